"""Name a run's data and model, also as parts of its folder's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mqo.errors import MqoError
from mqo.launch.command import flag_words, is_number
from mqo.matrix import tables
from mqo.matrix.tables import Dataset

# The flags for the user's own data, in the order in which upstream reads them.
_DATA_FLAGS = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}", re.ASCII)
_INDEX = re.compile("(_text)?_document$")  # ending of an index of preprocess_data.py
_MOST = 120  # characters of one part of a folder's name


def dataset_of(name: str | None, prefix: Path | None, extra_flags: Sequence[str]) -> Dataset:
    """Return the dataset of a run.

    Args:
        name: the user's name for it; None for the name of the data file.
        prefix: the user's own index, the path without .bin and .idx.
        extra_flags: the user's flags for Megatron, which may also name data.

    Raises:
        UnknownNameError: without data from the user, `name` is not a known dataset.
        MqoError: both name and data are missing, or the name cannot be part of a folder's name.
    """
    own = own_data(prefix, extra_flags)
    if name is None and own is None:
        raise MqoError("--dataset is missing", help="--list shows all valid names")
    if own is None or name in tables.datasets():
        return tables.pick(tables.datasets(), "dataset", name or "")
    if name is None:
        name = data_name(_INDEX.sub("", own))
    return Dataset(name=check_own("dataset", name), published_as=name, sample=False)


def data_name(stem: str) -> str:
    """Return the name of the data in a file with this stem."""
    name = re.sub(r"[^\w.+-]+", "-", stem, flags=re.ASCII)
    return name.strip("-.+_")[:64] or "data"


def own_data(prefix: Path | None, extra_flags: Sequence[str]) -> str | None:
    """Return the name of the file with the user's own data; None if none were given."""
    if prefix is None and "--mock-data" in extra_flags:
        return "mock-data"
    path = Path(prefix) if prefix else data_file(extra_flags)
    return path.name if path else None


def data_file(extra_flags: Sequence[str]) -> Path | None:
    """Return the first data file that the user's flags for Megatron name."""
    given = flag_words(extra_flags)
    words = [word for flag in _DATA_FLAGS for word in given.get(flag, ())]
    return next((Path(word) for word in words if not is_number(word)), None)


def check_own(kind: str, name: str) -> str:
    """Return a name that the user chose; MqoError if it cannot be part of a folder's name."""
    if not _NAME.fullmatch(name):
        raise MqoError(
            f"The {kind} cannot be called {name!r}, since the name is part of a run folder's name",
            expected="at most 64 letters, digits and . _ + -, beginning with a letter or a digit",
            help="Rename the file or folder, or give another name with --name or --dataset",
        )
    return name


def folder_part(text: str) -> str:
    """Return the text with only letters, digits and . _ + -, for names of folders and files."""
    text = text.replace("*", "-changed")
    return re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-")[:_MOST]
