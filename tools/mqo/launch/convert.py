"""Weights between Hugging Face's folders and upstream's checkpoints.

What is on either side is found out here; the weights go through Megatron-LM/tools/convert.py, a
process on the tree. The target appears when it is complete, by a rename, or not at all.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import ConvertError, SetupError
from mqo.launch.flags import DTYPES, architecture_flags, platform_flags
from mqo.launch.hf_config import config_of, dtype_of_args, shape_of_args, shape_of_config
from mqo.launch.inputs import TRACKER
from mqo.launch.machine import Machine
from mqo.matrix.tables import Shape
from mqo.process import temporary_folder
from mqo.program import Advance, run_program
from mqo.runs import checkpoints_of

PROGRAM = "tools/convert.py"
# What a tokenizer consists of, in its various forms, and what goes with it.
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja")
TOKENIZER += ("added_tokens.json", "generation_config.json")
Report = Callable[[str], None]
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Converted:
    """What was written, and the flags by which Megatron's programs take it for the same model."""

    target: str
    flags: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the terminal."""
        return [self.target, f"model flags: {shlex.join(self.flags)}"]


def hf_to_megatron(
    tree: Path, source: Path, target: Path, report: Report = lambda line: None
) -> Converted:
    """Write the weights in the folder `source` as a checkpoint, from which a training starts.

    Their dtype stays; where they have several, the checkpoint has fp32. `report` gets a line for
    each stage.
    """
    config = _read_config(source)
    shape, sequence = shape_of_config(config), config["max_position_embeddings"]
    with staged(target) as stage:
        _run(
            tree, ["to-megatron", str(source), str(stage), *program_flags(shape, sequence)], report
        )
    return Converted(str(target), tuple(architecture_flags(shape, sequence)))


def megatron_to_hf(
    tree: Path,
    source: Path,
    target: Path,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    report: Report = lambda line: None,
) -> Converted:
    """Write a checkpoint's newest weights as a folder that transformers loads, in their dtype.

    `source` is a run, or a folder of checkpoints. `tokenizer` is a folder whose tokenizer goes with
    them. `vocab_size` is in rows of the embedding; without it, what the checkpoint says, which may
    have rows of padding.
    """
    source = checkpoints_of(source)
    if not (source / TRACKER).is_file():
        raise ConvertError(
            f"There is no {TRACKER} in {source}",
            expected="a run, or a checkpoint as Megatron saves one",
        )
    if tokenizer is not None and not tokenizer.is_dir():
        raise ConvertError(f"There is no folder {tokenizer}", expected="a tokenizer's folder")
    args = describe(tree, source)
    found = shape_of_args(args)
    shape = found.model_copy(update={"vocab_size": vocab_size or found.vocab_size})
    dtype, sequence = dtype_of_args(args), args["max_position_embeddings"]
    flags = [*program_flags(shape, sequence), *DTYPES[dtype]]
    with staged(target) as stage:
        config = config_of(shape, dtype, sequence) | copy_tokenizer(tokenizer, stage)
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _run(tree, ["to-hf", str(source), str(stage), *flags], report)
    return Converted(str(target), tuple(architecture_flags(shape, sequence)))


def program_flags(shape: Shape, sequence: int) -> list[str]:
    """The model without padding of its vocabulary, on the CPU."""
    vocabulary = ["--vocab-size", str(shape.vocab_size), "--make-vocab-size-divisible-by", "1"]
    return [*architecture_flags(shape, sequence), *platform_flags(Machine(1, 0)), *vocabulary]


def _read_config(source: Path) -> dict[str, Any]:
    try:
        return json.loads((source / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConvertError(
            f"There is no config.json in {source}", expected="a folder as transformers saves one"
        ) from None
    except ValueError as error:
        raise ConvertError(f"{source / 'config.json'} is no JSON: {error}") from None


def describe(tree: Path, checkpoint: Path) -> dict[str, Any]:
    """The arguments that a checkpoint was written with."""
    with temporary_folder("mqo-convert-") as folder:
        facts = folder / "args.json"
        _run(tree, ["describe", str(checkpoint), str(facts)])
        return json.loads(facts.read_text(encoding="utf-8"))


def copy_tokenizer(tokenizer: Path | None, stage: Path) -> dict[str, Any]:
    """Copy a tokenizer's files; the ids of special tokens, from the config.json beside them."""
    config: dict[str, Any] = {}
    if tokenizer is not None:
        for path in {path for glob in TOKENIZER for path in tokenizer.glob(glob)}:
            shutil.copyfile(path, stage / path.name)
        if (tokenizer / "config.json").exists():
            config = _read_config(tokenizer)
    # Without a value transformers would take the ids of a tokenizer of its own.
    return {name: config.get(name) for name in SPECIAL}


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it when all went well."""
    if target.exists():
        raise ConvertError(f"{target} is there already", expected="a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{target.name}-", target.parent) as folder:
        stage = folder / target.name
        stage.mkdir()
        yield stage
        readable = stage.stat().st_mode & 0o666
        for path in stage.rglob("*"):
            if path.is_file():
                path.chmod(readable)  # safetensors leaves its files to their owner alone
        stage.rename(target)


def _run(tree: Path, words: list[str], report: Report = lambda line: None) -> None:
    """Run the program; ConvertError in its words where the files are to blame, else RunError."""
    if importlib.util.find_spec("modelopt") is None:
        raise SetupError(
            "nvidia-modelopt is not installed, which knows the names of the weights",
            help="`.venv/bin/pip install -c constraints.txt -e '.[modelopt]'` brings it",
        )
    told: set[Advance] = set()

    def watch(advance: Advance) -> None:
        if advance not in told:
            told.add(advance)
            report(f"  {advance.done}/{advance.total}  {advance.what}")

    run_program(tree / PROGRAM, words, error=ConvertError, watch=watch)
