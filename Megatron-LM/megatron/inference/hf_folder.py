"""List the tensors in a transformers folder; each is read on first use."""

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
            if name != METADATA:
                tensors[name] = StoredTensor(path, tuple(part["shape"]), part["dtype"])
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(BUFFERS)}


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
