"""Check that the weights of a Hugging Face folder are in full precision, before they are read.

This module needs only the standard library, so that `mqo` checks before it starts a program.
"""

from pathlib import Path
from typing import Any

from mqo.megatron.run.errors import SavedError, reading
from mqo.megatron.run.untrusted import METADATA, read_json_object, read_safetensors_header

CONFIG = "config.json"
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors of old files that hold no weights.
BUFFERS = ".rotary_emb.inv_freq"
FULL_PRECISION = ("F32", "BF16", "F16")  # names of safetensors
OWN_LAYOUT = "mqo"


def check_folder(folder: Path) -> None:
    """Raise SavedError unless a folder has a config.json and weights in fp32, bf16 or fp16.

    Links must lead to files of the folder, or from a Hugging Face cache's snapshot to its blobs.
    """
    config = read_object(folder / CONFIG)
    if quantized := config.get("quantization_config"):
        _refuse_quantized(folder, quantized)
    for path in weight_files(folder):
        with reading():
            header = read_safetensors_header(path, within=folder)
        for name, tensor in header.items():
            dtype = tensor.get("dtype")
            if name != METADATA and not name.endswith(BUFFERS) and dtype not in FULL_PRECISION:
                raise SavedError(
                    f"{path} holds {name} as {dtype}",
                    "weights in fp32, bf16 or fp16",
                    "Quantized weights are not supported: give the model before quantization",
                )


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
