"""Check an untrusted tokenizer before a library reads it.

The libraries follow links, wait for pipes and run patterns that may not end. Here the files of a
folder are checked by name, then loaded and used in a child process with limits.
"""

import functools
import os
from pathlib import Path

from mqo.megatron.run import isolated
from mqo.megatron.run.untrusted import Limit, check_file, read_json

# Files that define a vocabulary. A folder with any of them is a tokenizer's.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
CONFIG = "tokenizer_config.json"
# Files that a tokenizer's class may read, and that are copied with a model. Others may be code.
FILES = (
    *(*VOCABULARIES, CONFIG, "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
# Next to a tokenizer: transformers reads it to choose the class.
MODEL = "config.json"
# Repeated characters of one kind, and an end: a careless pattern tries every split of these.
_RUNS = ("a", "A", "1", " ", "\n", "!", "a1", "aA", "\u00e9", "a ")
_PROBES = tuple(run * (2000 // len(run)) + end for run in _RUNS for end in ("", "!", "\0"))


def check_tokenizer(path: Path) -> None:
    """Raise UntrustedFileError unless a tokenizer's folder or file loads and encodes within limits.

    Links must lead to files of the folder, or from a Hugging Face cache's snapshot to its blobs.
    """
    folder = path if path.is_dir() else path.parent
    names = (*FILES, MODEL) if path.is_dir() else (path.name,)
    files = [folder / name for name in names if os.path.lexists(folder / name)]
    for file in files:
        check_file(file, Limit.TOKENIZER, within=folder)
    stats = [file.stat() for file in files]
    marks = tuple(
        (file, status.st_size, status.st_mtime_ns)
        for file, status in zip(files, stats, strict=True)
    )
    _try(folder, marks)


@functools.cache
def _try(folder: Path, marks: tuple[tuple[Path, int, int], ...]) -> None:
    """Load a tokenizer in a child process, once per state of its files."""
    files = [file for file, *_ in marks]
    limits = isolated.limits_of(sum(size for _, size, _ in marks))
    isolated.try_first(lambda: _load(folder, files), folder, limits)


def _load(folder: Path, files: list[Path]) -> None:
    from tokenizers import Tokenizer

    for file in files:
        if file.suffix == ".json":
            read_json(file, Limit.TOKENIZER, within=folder)
    if folder / VOCABULARIES[0] in files:
        tokenizer = Tokenizer.from_file(str(folder / VOCABULARIES[0]))
        for text in _PROBES:
            tokenizer.encode(text)
