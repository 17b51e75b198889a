"""The .bin/.idx pair of a sample; checks of given prefixes."""

from __future__ import annotations

import difflib
from pathlib import Path

from mqo.data.encode import load
from mqo.data.meter import Meter
from mqo.data.pair import State
from mqo.data.pair_check import check_pair
from mqo.data.pipeline import Job, index
from mqo.errors import DataError

_SUFFIXES = (".bin", ".idx")


def build_index(text: Path, tokenizer: Path, stem: Path) -> State:
    """Tokenises `text` (JSON lines) into STEM_text_document.bin and .idx, documents ended by EOD.

    In this process alone: a sample is small. Returns the counts. Raises DataError for a bad line.
    """
    job = Job((text,), "jsonl", ("text",), load(tokenizer), stem, strict=True)
    return index(job, workers=1, meter=Meter(lambda line: None))


def check_prefix(prefix: Path) -> None:
    """Check that PREFIX.bin and PREFIX.idx exist, and fit each other.

    Raises:
        DataError: the text names what exists, or the file's fault, and what helps.
    """
    missing = _missing(prefix)
    if not missing:
        check_pair(prefix)
        return
    raise DataError(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in "
        f"{prefix.parent}; {_seen(prefix)}",
        expected=f"{prefix.name}.bin and {prefix.name}.idx, as preprocess_data.py writes them",
        help=_advice(prefix),
    )


def _missing(prefix: Path) -> list[str]:
    names = [prefix.name + suffix for suffix in _SUFFIXES]
    return [name for name in names if not (prefix.parent / name).is_file()]


def _complete(folder: Path) -> list[str]:
    """Names in `folder` that have both files."""
    stems = {p.name[:-4] for p in folder.glob("*.bin") if p.is_file()}
    return sorted(s for s in stems if (folder / f"{s}.idx").is_file())


def _seen(prefix: Path) -> str:
    if not prefix.parent.is_dir():
        return "there is no such folder"
    complete = _complete(prefix.parent)
    if not complete:
        files = sorted(p.name for p in prefix.parent.iterdir())
        listed = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
        return f"the folder holds no complete prefix, but {listed or 'nothing at all'}"
    near = difflib.get_close_matches(prefix.name, complete, n=3, cutoff=0.5) or complete[:3]
    return f"the folder holds {', '.join(near)}"


def _advice(prefix: Path) -> str:
    # By far the commonest slip: naming one of the two files instead of what both begin with.
    if prefix.suffix in _SUFFIXES and not _missing(prefix.with_suffix("")):
        return f"Give the prefix without its ending: {prefix.with_suffix('')}"
    extended = prefix.with_name(prefix.name + "_text_document")
    if not _missing(extended):
        return f"preprocess_data.py adds the JSON key to the name: give {extended}"
    return (
        "Give the path without .bin or .idx, or make the pair with "
        "Megatron-LM/tools/preprocess_data.py"
    )
