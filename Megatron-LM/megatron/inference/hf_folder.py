"""The tensors in a folder that transformers loads, read when they are asked for."""

import json
from dataclasses import dataclass
from pathlib import Path

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


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name, from its one file or those of its index.

    Raises:
        SavedError: a file is missing, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    names = {ONE_FILE}
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
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
