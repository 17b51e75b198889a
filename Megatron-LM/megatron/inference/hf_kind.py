"""The check of every command that reads a Hugging Face folder: are its weights in full precision?

It needs the standard library only, so that `mqo` asks before it starts a program.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SavedError

CONFIG = "config.json"
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors of old files that hold no weights.
BUFFERS = ".rotary_emb.inv_freq"
FULL_PRECISION = ("F32", "BF16", "F16")  # names of safetensors
LARGEST_HEADER = 100_000_000  # bytes, the limit of safetensors
OWN_LAYOUT = "mqo"


def check_folder(folder: Path) -> None:
    """Raise SavedError unless a folder has a config.json and weights in fp32, bf16 or fp16."""
    config = read_object(folder / CONFIG)
    if quantized := config.get("quantization_config"):
        _refuse_quantized(folder, quantized)
    for path in weight_files(folder):
        for name, tensor in _header(path).items():
            dtype = tensor.get("dtype") if isinstance(tensor, dict) else None
            if (
                name != "__metadata__"
                and not name.endswith(BUFFERS)
                and dtype not in FULL_PRECISION
            ):
                raise SavedError(
                    f"{path} holds {name} as {dtype}",
                    "weights in fp32, bf16 or fp16",
                    "Quantized weights are not read: take the model that they were made from",
                )


def _refuse_quantized(folder: Path, quantized: Any) -> None:
    """Raise SavedError for what config.json says of the quantization."""
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method == OWN_LAYOUT:
        raise SavedError(
            f"{folder} holds weights that `mqo export` packed, in its layout {OWN_LAYOUT}",
            "weights in fp32, bf16 or fp16",
            f"Write them in full precision: python {folder}/dequantize.py {folder} IN_FULL",
        )
    raise SavedError(
        f"{folder} holds quantized weights: config.json has a quantization_config of {method}",
        "weights in fp32, bf16 or fp16",
        "Quantized weights are not read: take the model that they were made from",
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: its one file, or those of its index.

    Raises:
        SavedError: there is none; the index names no files, or one that is missing.
    """
    index, names = folder / INDEX, {ONE_FILE}
    if index.exists():
        listed = read_object(index).get("weight_map")
        found = [*listed.values()] if isinstance(listed, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name for name in found):
            raise SavedError(f"{index} names no files", "a file in the same folder for each tensor")
        names = set(found)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if not missing:
        return sorted(folder / name for name in names)
    if index.exists():
        what = f"{index} names {missing[0]}, which is not in {folder}"
        raise SavedError(what, f"its {len(names)} files of weights")
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    what = f", and {pickled[0]} is a pickle, which can run code" if pickled else ""
    raise SavedError(
        f"There is no {ONE_FILE} in {folder}{what}",
        f"{ONE_FILE}, or {INDEX} and its files",
        "transformers writes them with save_pretrained" if pickled else "",
    )


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; SavedError if there is none."""
    if not path.is_file():
        raise SavedError(f"{path} is missing, or is not a file", "a JSON object")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SavedError(f"{path} cannot be read: {error}", "a JSON object") from None
    if not isinstance(found, dict):
        raise SavedError(f"{path} holds no object", "names and values")
    return found


def _header(path: Path) -> Mapping[str, Any]:
    """Return what a safetensors file says of its tensors, by name."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > LARGEST_HEADER:
                raise ValueError(f"its header has {size} bytes")
            found = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise SavedError(f"{path} cannot be read: {error}", "safetensors") from None
    if not isinstance(found, dict):
        raise SavedError(f"{path} cannot be read: its header is not an object", "safetensors")
    return found
