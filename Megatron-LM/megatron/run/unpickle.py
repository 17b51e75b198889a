"""Looks at the one file of a checkpoint that torch unpickles without asking what is in it.

Everything else is read with `weights_only`, or is no pickle. `.metadata` says which tensor lies
where; torch loads it with plain pickle, which would run whatever a hostile file says.
"""

import enum
import pickle
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"

# What torch and Megatron write there.
_KNOWN = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}


class _ForeignError(Exception):
    """A name that has no business in a checkpoint's metadata."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise _ForeignError(f"{module}.{name}")


def foreign_name(checkpoint: Path) -> str | None:
    """Return what a checkpoint's metadata would import that none needs; None if nothing.

    Nothing of the file is run but the constructors of torch's own records. That a file is damaged
    is not this function's to say.
    """
    try:
        with (checkpoint / METADATA).open("rb") as file:
            _Reader(file).load()
    except _ForeignError as found:
        return str(found)
    except Exception:  # a damaged pickle raises whatever it likes
        return None
    return None


def _member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration, which Python 3.11.2 pickles as an attribute."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise _ForeignError("builtins.getattr")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
