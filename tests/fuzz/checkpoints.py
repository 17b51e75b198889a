"""Damage checkpoints: pickles in each file that torch reads as one, arguments, bytes and kinds.

This module imports torch and Megatron; `makers.py` uses it in a process of its own.
"""

from __future__ import annotations

import copy
import random
from argparse import Namespace
from pathlib import Path

import torch
from megatron.inference.checkpointing import common_state

from ..test_foreign_checkpoints import in_an_entry, in_common, in_metadata, seal
from . import damages

_states: dict[Path, dict] = {}


def state_of(iteration: Path) -> dict:
    """Return what is not a tensor in the undamaged checkpoint."""
    if iteration not in _states:
        _states[iteration] = common_state(iteration)
        torch.distributed.destroy_process_group()
    return copy.deepcopy(_states[iteration])


def damage(draw: random.Random, folder: Path, sound: Path, marker: Path) -> tuple[str, bool]:
    """Damage a copy of `sound`; return what was done and whether each reader must refuse it."""
    (iteration,) = folder.glob("iter_*")
    kind = draw.choice(("code", "code", "memory", "arguments", "arguments", "file", "bytes"))
    if kind in ("code", "memory"):
        table = damages.calls(marker) if kind == "code" else damages.allocations()
        name, hide = draw.choice(sorted(table)), draw.choice((in_metadata, in_an_entry, in_common))
        hide(iteration, table[name])
        seal(iteration)
        return f"{name} {hide.__name__}", True
    if kind == "arguments":
        return arguments(draw, iteration, sound / iteration.name), False
    if kind == "file":
        return _damage_file(draw, folder), False
    path = draw.choice((iteration / ".metadata", iteration / "__0_0.distcp"))
    done = damages.damage_file(draw, path, damages.BINARY)
    if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 29:
        sealed = draw.random() < 0.5
        if sealed:
            seal(iteration)
        return f"{done}, {'sealed' if sealed else 'not sealed'}", False
    return done, False


def _damage_file(draw: random.Random, folder: Path) -> str:
    names = ("latest_checkpointed_iteration.txt", "metadata.json", "integrity.json")
    return damages.damage_one(draw, folder, names)


def arguments(draw: random.Random, iteration: Path, sound: Path) -> str:
    """Change one or two arguments of a checkpoint."""
    state = state_of(sound)
    table = vars(state["args"])
    names = draw.sample(sorted(table), draw.choice((1, 1, 2)))
    if draw.random() < 0.5:
        sizes = [name for name in table if type(table[name]) is int]
        names = [draw.choice(sorted(sizes))]
    values = (*damages.VALUES[:-2], Namespace(a=1), torch.ones(3), 10**400, b"x", (1, 2), 2**31)
    changes = {name: draw.choice(values) for name in names}
    table.update(changes)
    torch.save(state, iteration / "common.pt")
    seal(iteration)
    return " ".join(f"{name}={value!r:.40}" for name, value in changes.items())


def weights_of_hf(draw: random.Random, folder: Path, marker: Path) -> str:
    """Replace a Hugging Face folder's weights by a pickle that would run code."""
    if draw.random() < 0.7:
        (folder / "model.safetensors").unlink()
    name = draw.choice(("pytorch_model.bin", "model.safetensors", "consolidated.00.pth"))
    return damages.pickle_file(draw, folder / name, marker, torch.save)
