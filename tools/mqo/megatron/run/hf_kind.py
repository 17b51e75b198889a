"""Check a Hugging Face folder, whose weights must be in full precision, and list its tensors.

Checks need only the standard library, so that `mqo` checks before it starts a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqo.megatron.run.errors import SavedError, reading, words_of
from mqo.megatron.run.untrusted import (
    METADATA,
    Limit,
    check_file,
    open_safetensors,
    read_json_object,
    read_safetensors_header,
)

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors of old files that hold no weights.
BUFFERS = ".rotary_emb.inv_freq"
FULL_PRECISION = ("F32", "BF16", "F16")  # names of safetensors
OWN_LAYOUT = "mqo"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file; `dtype` is the file format's name of it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, name: str) -> Tensor:
        """Read the tensor, which has the name `name` in the file."""
        with open_safetensors(self.path) as file:
            return file.get_tensor(name)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name, from its only file or the files of its index.

    Raises:
        SavedError: a file is missing, or cannot be read.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        with reading():
            header = read_safetensors_header(path, within=folder)
        for name, part in header.items():
            if name != METADATA and not name.endswith(BUFFERS):
                tensors[name] = StoredTensor(path, tuple(part["shape"]), part["dtype"])
    return tensors


def check_folder(folder: Path) -> None:
    """Raise SavedError unless a folder has a config.json and weights in fp32, bf16 or fp16.

    Links must lead to files of the folder, or from a Hugging Face cache's snapshot to its blobs.
    """
    config = read_object(folder / CONFIG)
    if quantized := config.get("quantization_config"):
        _refuse_quantized(folder, quantized)
    for name, tensor in stored_tensors(folder).items():
        if tensor.dtype not in FULL_PRECISION:
            raise SavedError(
                f"{tensor.path} holds {name} as {tensor.dtype}",
                "weights in fp32, bf16 or fp16",
                "Quantized weights are not supported: give the model before quantization",
            )


def check_config(folder: Path) -> None:
    """Raise SavedError unless transformers accepts a folder's config.json."""
    from transformers import AutoConfig

    with reading():
        check_file(folder / CONFIG, Limit.RECORD, within=folder)
    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the classes of transformers raise errors of any type
        raise SavedError(
            f"transformers does not accept {folder / CONFIG}: {words_of(error)}",
            "the config.json of a model that transformers loads",
        ) from None  # it may advise to run code


def _refuse_quantized(folder: Path, quantized: Any) -> None:
    """Raise SavedError for the quantization_config in config.json."""
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
        "Quantized weights are not supported: give the model before quantization",
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: its one file, or those of its index.

    Raises:
        SavedError: there are none; the index names no files, or a missing file.
    """
    index, names = folder / INDEX, {ONE_FILE}
    if index.exists():
        listed = read_object(index).get("weight_map")
        files: list[Any] = [*listed.values()] if isinstance(listed, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise SavedError(f"{index} names no files", "a file in the same folder for each tensor")
        names = set(files)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if not missing:
        return sorted(folder / name for name in names)
    if index.exists():
        clause = f"{index} names {missing[0]}, which is not in {folder}"
        raise SavedError(clause, f"all {len(names)} files of weights")
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    pickle = f", and {pickled[0]} is a pickle, which can run code" if pickled else ""
    raise SavedError(
        f"There is no {ONE_FILE} in {folder}{pickle}",
        f"{ONE_FILE}, or {INDEX} and its files",
        "Write these with save_pretrained of transformers" if pickled else "",
    )


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a folder; SavedError if it has none."""
    with reading():
        return read_json_object(path, within=path.parent)
