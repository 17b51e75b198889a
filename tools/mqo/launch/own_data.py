"""The user's own data in a command: text files, or an index with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqo.data.own_text import TextFiles, stem, text_files
from mqo.errors import MqoError
from mqo.launch.command import flag_words
from mqo.launch.naming import data_name, own_data
from mqo.project import Project

if TYPE_CHECKING:
    from mqo.launch.config import Experiment

_TOKENIZER_FLAGS = ("--tokenizer-model", "--tokenizer-type", "--vocab-file", "--merge-file")


@dataclass(frozen=True)
class OwnData:
    """The fields of an Experiment for the user's data; all are None for a dataset's sample.

    With `text`, the tokenizer and the index may not exist yet: a run prepares them.
    """

    tokenizer: Path | None = None
    data_prefix: Path | None = None
    text: TextFiles | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields for `resolve`."""
        return vars(self)


NO_DATA = OwnData()


def of_options(
    project: Project,
    text: Sequence[Path],
    tokenizer: Path | None,
    data_prefix: Path | None,
    extra_flags: Sequence[str] = (),
    *,
    strict: bool = False,
) -> OwnData:
    """Return the data of a command's options; nothing is prepared.

    Raises:
        MqoError: options contradict each other, or --strict has no text.
        DataError: a file does not hold text, or the tokenizer for it is missing.
    """
    if not text:
        if strict:
            raise MqoError("--strict was given without --text", expected="--text FILE with it")
        return OwnData(tokenizer, data_prefix)
    if given := own_data(data_prefix, extra_flags):
        raise MqoError(f"--text was given with the data {given}", expected="one of them")
    words = flag_words(extra_flags)
    if flags := [flag for flag in _TOKENIZER_FLAGS if flag in words]:
        raise MqoError(
            f"--text was given with {flags[0]} after `--`",
            expected="--tokenizer FOLDER, which the text is encoded with, too",
        )
    name = data_name("+".join(map(stem, text)))
    files = text_files(text, name, tokenizer, strict=strict)
    trained, prefix = files.paths(project)
    return OwnData(tokenizer or trained, prefix, files)


def text_words(experiment: Experiment) -> list[str]:
    """Return the options of a run's text; none without text."""
    if (text := experiment.text) is None:
        return []
    words = ["--text", *text.files, *(["--strict"] if text.strict else [])]
    return [*words, "--tokenizer", str(experiment.tokenizer)] if text.tokenizer else words


def either(option: str, by_option: Path | None, argument: str, value: Path | None) -> Path | None:
    """Return the value of an option or of the positional argument for the same.

    Raises:
        MqoError: both were given.
    """
    if by_option is not None and value is not None:
        raise MqoError(
            f"Both {option} {by_option} and the argument {argument} {value} were given",
            expected="one of them",
        )
    return value if by_option is None else by_option
