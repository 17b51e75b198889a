"""JSON lines into Megatron's .bin/.idx pair, by the indexing program; checks of given prefixes."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mqo.errors import DataError, OverlayError

_SUFFIXES = (".bin", ".idx")
_TAIL = 12  # lines of the program's output that an error quotes


@dataclass(frozen=True)
class IndexCounts:
    """What an index holds: documents, and tokens with one end-of-document token a document."""

    documents: int
    tokens: int


def build_index(tree: Path, text: Path, tokenizer: Path, stem: Path) -> IndexCounts:
    """Tokenises `text` (JSON lines) into STEM_text_document.bin and .idx, documents ended by EOD.

    Runs `tools/preprocess_data.py` of `tree` on that tree's megatron.core, as a process of its own
    that writes nothing into the tree. Raises OverlayError if the tree holds no megatron.core,
    DataError if the program fails.
    """
    check_tree(tree)
    command = [sys.executable, str(tree / "tools" / "preprocess_data.py")]
    command += ["--input", str(text), "--output-prefix", str(stem), "--append-eod"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    command += ["--workers", str(os.cpu_count() or 1)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),  # nothing else: another megatron on the path would hide the tree's
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_TAIL:])
        raise DataError(
            f"Indexing {text.name} failed with exit code {done.returncode}; it said:\n{tail}",
            help="If the fault lies in megatron.core, check the tree with 'mqo status'",
        )
    counts = json.loads(done.stdout.strip().splitlines()[-1])
    return IndexCounts(documents=counts["documents"], tokens=counts["tokens"])


def check_tree(tree: Path) -> None:
    """Raises OverlayError if `tree` holds no megatron.core to index with."""
    if (tree / "megatron" / "core" / "datasets" / "indexed_dataset.py").is_file():
        return
    raise OverlayError(
        f"{tree} holds no megatron.core",
        expected="upstream's source, unpacked from the pinned wheel and patched",
        help="Run 'mqo vendor', then 'mqo apply'",
    )


def check_prefix(prefix: Path) -> None:
    """Raises DataError unless PREFIX.bin and PREFIX.idx exist, naming what does and what helps."""
    missing = _missing(prefix)
    if not missing:
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
