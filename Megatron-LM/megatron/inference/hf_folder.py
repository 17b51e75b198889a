"""The tensors in a transformers folder, each read on first use."""

from dataclasses import dataclass
from pathlib import Path

from mqo.megatron.run.errors import SavedError, reading, words_of
from mqo.megatron.run.hf_kind import BUFFERS, CONFIG, weight_files
from mqo.megatron.run.untrusted import (
    METADATA,
    Limit,
    check_file,
    open_safetensors,
    read_safetensors_header,
)
from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` is the format's name for it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, name: str) -> Tensor:
        """Return its content; the file knows it by `name`."""
        with open_safetensors(self.path) as file:
            return file.get_tensor(name)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name, from its one file or those of its index.

    Raises:
        SavedError: a file is missing, or cannot be read.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        with reading():
            header = read_safetensors_header(path, within=folder)
        for name, part in header.items():
            if name != METADATA:
                tensors[name] = StoredTensor(path, tuple(part["shape"]), part["dtype"])
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(BUFFERS)}


def check_config(folder: Path) -> None:
    """Raise SavedError unless transformers takes the values in a folder's config.json."""
    from transformers import AutoConfig

    with reading():
        check_file(folder / CONFIG, Limit.RECORD, within=folder)
    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the classes of transformers raise errors of any type
        raise SavedError(
            f"transformers does not take {folder / CONFIG}: {words_of(error)}",
            "a config.json of a model that it loads",
        ) from None  # it may advise to run code
