"""The tensors in a folder that transformers loads, read when they are asked for."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .errors import SavedError
from .hf_kind import BUFFERS, weight_files


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

    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for name, part in parts.items():
                    tensors[name] = StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise SavedError(f"{path} cannot be read: {error}", "safetensors") from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(BUFFERS)}
