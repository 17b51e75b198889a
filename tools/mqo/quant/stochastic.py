"""Counter-based random numbers for stochastic rounding, the same in every implementation.

Element i of a tensor (its index in row-major order of the shape, for any strides) draws output i of
SplitMix64 started at the seed. All arithmetic is on unsigned 64-bit integers, modulo 2^64:

    z = seed + (i + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    draw = (z ^ (z >> 31)) >> 40                     the top RANDOM_BITS = 24 bits

A magnitude between two neighbors of the grid, at the share f of the way from the lower to the
upper (0 <= f < 1, exact), is rounded up if and only if

    draw < floor(f * 2^24)

so P(up) = floor(f * 2^24) / 2^24: exactly f for float32 values in the normal range of an element,
and too small by less than 2^-24 elsewhere. A value on the grid does not change.
"""

import hashlib
import json

import torch
from torch import Tensor

RANDOM_BITS = 24
_STEP = 0x9E3779B97F4A7C15


def derive_seed(
    base: int, *, step: int, micro_batch: int, shard: int, site: str, operand: str, layer: str
) -> int:
    """Return the seed, 0 .. 2^64 - 1, of one operand of one layer's GEMM in one micro-batch.

    It is the first 8 bytes, little-endian, of BLAKE2b-64 over the JSON list of the arguments in the
    order above. `step` counts optimizer steps; `micro_batch` counts the micro-batches of a step
    over all data-parallel ranks, so that the errors of the gradient average out; `shard` is the
    rank among those that hold shards of the operand.
    """
    return _hashed([base, step, micro_batch, shard, site, operand, layer])


def split_seed(seed: int, number: int) -> int:
    """Return the seed of a further tensor of the operand with `seed`, the same for one number."""
    return _hashed([seed, number])


def _hashed(values: list[int | str]) -> int:
    text = json.dumps(values)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def draws(shape: torch.Size, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the draw of each element of a tensor of `shape`: int64, 0 .. 2^24 - 1."""
    # int64 wraps like uint64; only its right shifts must not extend the sign.
    index = torch.arange(1, shape.numel() + 1, device=device)
    z = index * signed(_STEP) + signed(seed)
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return _shift(z ^ _shift(z, 31), 64 - RANDOM_BITS).reshape(shape)


def skipped(seed: int, elements: int) -> int:
    """Return the seed with which element 0 gets the draw of element `elements` with `seed`."""
    return (seed + elements * _STEP) % 2**64


def signed(unsigned: int) -> int:
    """Return the int64 with the same 64 bits."""
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def _shift(z: Tensor, bits: int) -> Tensor:
    kept: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return kept
