"""Unpack the weights of a folder: `python dequantize.py FOLDER TARGET`.

`mqo export --layout mqo` wrote FOLDER. TARGET must be new; transformers loads it. This file needs
only torch and safetensors, and may be copied with the folder.

In packed_*.safetensors, a module's weight [out, in] becomes

- MODULE.codes: uint8 [out, in x bits / 8],
- MODULE.scales of its blocks: uint8, or float32 for the scale "fp32"; [out / rows, blocks], for
  hif4 [..., 4],
- MODULE.scale of the tensor: float32 [1].

docs/formats.md of the project (packed storage) defines their bytes. quantization_config in
config.json gives each module in `modules` a type. For each type in `types` it has the `bits` of a
code, the `values` by code, the kind of `scale` (and `block_scale`, the element of the scales of
blocks, if it differs), the elements of a `block`, and how many `rows` share scales (1, or the side
of a square).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "packed_"
# Errors from reading a damaged folder.
UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError),
    SafetensorError,
)


def main(folder: Path, target: Path) -> None:
    """Write the folder `target`; remove a partial one."""
    if target.exists() or target.is_symlink():
        sys.exit(f"{target} already exists. Expected: a new folder.")
    try:
        write(folder, target)
    except UNREADABLE as error:
        shutil.rmtree(target, ignore_errors=True)
        reason = f"{type(error).__name__}: {error}"
        sys.exit(
            f"{folder} cannot be read, or {target} cannot be written ({reason}). "
            "Expected: a folder that `mqo export` wrote, and enough space for the full weights."
        )


def write(folder: Path, target: Path) -> None:
    """Write the folder `target`; raise one of UNREADABLE if `folder` is damaged."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    packed = config.pop("quantization_config")
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    ours = shutil.ignore_patterns(Path(__file__).name, f"{PREFIX}*")
    shutil.copytree(folder, target, ignore=ours)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    where = {}
    for path in sorted(folder.glob(f"{PREFIX}*.safetensors")):
        tensors = load_file(path)
        for module in [name[: -len(".codes")] for name in tensors if name.endswith(".codes")]:
            kind = packed["types"][packed["modules"][module]]
            parts = [tensors.pop(f"{module}.{p}", None) for p in ("codes", "scales", "scale")]
            tensors[f"{module}.weight"] = weight(kind, *parts).to(dtype)
        name = path.name[len(PREFIX) :]
        save_file(tensors, target / name, {"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
    if len(set(where.values())) > 1:
        index = json.dumps({"metadata": {}, "weight_map": where})
        (target / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def weight(kind: dict, codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Return a weight [out, in], float32; a scale that its type does not have is None."""
    values = torch.tensor([float(value) for value in kind["values"]])[elements(codes, kind["bits"])]
    if kind["scale"] in ("one-level", "two-level"):
        factors = levels(kind.get("block_scale", "e4m3"), scales, scale)
    else:
        factors = decoded(kind["scale"], scales, scale)
    if kind["block"]:
        factors = factors.repeat_interleave(kind["rows"], 0)[: len(codes)]
        run = kind["block"] // (16 if kind["scale"] == "hif4" else 1)
        factors = factors.repeat_interleave(run, 1)[:, : values.shape[1]]
    return values * factors


def elements(codes: Tensor, bits: int) -> Tensor:
    """Unpack codes [out, in]; those of 4 and 6 bits begin at the lowest bit of a byte."""
    count, size = {4: (2, 1), 6: (4, 3), 8: (1, 1)}[bits]
    words = (codes.long().unflatten(1, (-1, size)) << 8 * torch.arange(size)).sum(-1, keepdim=True)
    return (words >> bits * torch.arange(count) & (1 << bits) - 1).flatten(1)


def decoded(kind: str, scales: Any, scale: Any) -> Tensor:
    """Return the factor of each run of elements in a row, float32."""
    if kind in ("none", "tensor"):
        power = torch.ones(1) if scales is None else decoded("e8m0", scales, None)
        return power if scale is None else scale
    if kind == "fp32":
        return scales
    if kind == "hif4":  # E6M2, and one bit for each of 8 runs of 8 and 16 runs of 4 elements
        code = scales[..., :1].int()
        top = torch.ldexp(1 + (code & 3) / 4, (code >> 2) - 48)
        bits = (scales[..., 1:].unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2)
        return (top * 2.0 ** (bits[..., :8].repeat_interleave(2, -1) + bits[..., 8:])).flatten(-2)
    return torch.ldexp(torch.ones(scales.shape), scales.int() - 127)  # powers of two


def levels(element: str, scales: Any, scale: Any) -> Tensor:
    """Return the scales of blocks, E4M3 or UE5M3, times that of the tensor, if any, float32."""
    blocks = scales.view(torch.float8_e4m3fn).float()
    if element == "ue5m3":
        field, mantissa = scales.int() >> 3, scales.int() & 7
        blocks = torch.ldexp(mantissa + 8.0 * (field > 0), field.clamp(min=1) - 18)
        blocks[scales == 255] = float("nan")
    return blocks if scale is None else blocks * scale


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
