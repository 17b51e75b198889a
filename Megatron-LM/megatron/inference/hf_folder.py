"""The tensors in a folder that transformers loads, read when they are asked for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .errors import SavedError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors of old files that hold no weights.
BUFFERS = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` is the format's name for it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, name: str) -> Tensor:
        """Return its content; the file knows it by `name`."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; SavedError where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SavedError(f"{path} cannot be read: {error}", "a JSON object") from None
    if not isinstance(found, dict):
        raise SavedError(f"{path} holds no object", "names and values")
    return found


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name, from its one file or those of its index.

    Raises:
        SavedError: a file is missing, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    names = {ONE_FILE}
    if index.exists():
        listed = read_object(index).get("weight_map")
        found = [*listed.values()] if isinstance(listed, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name for name in found):
            raise SavedError(f"{index} names no files", "those that lie beside it, for each tensor")
        names = set(found)
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder / name for name in names):
        try:
            with safe_open(path, "pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for name, part in parts.items():
                    tensors[name] = StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise SavedError(f"{path} cannot be read: {error}", "safetensors") from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(BUFFERS)}
