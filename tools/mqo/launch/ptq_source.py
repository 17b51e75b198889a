"""Describe a model for Megatron-LM/examples/export/ptq_and_trtllm_export/text_generation_ptq.py.

    python -m mqo.launch.ptq_source --tree TREE --load MODEL --out FOLDER

FOLDER gets source.json (the checkpoint, the flags that build its model, the arguments of its
training, its tokenizer) and hf/, the files that accompany exported weights. A model from Hugging
Face is converted into FOLDER first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mqo.errors import ConvertError
from mqo.launch import convert
from mqo.launch.checkpoints import require_tracker
from mqo.launch.flags import DTYPES
from mqo.launch.hf_config import config_of, context_of, dtype_of_args, shape_of_args
from mqo.launch.hf_source import is_hf_folder
from mqo.launch.published_args import IGNORE_FLAG
from mqo.launch.size import check_size
from mqo.runs import checkpoints_of
from mqo.terminal import guarded

TOKENIZER = "tokenizer.json"


def write(
    tree: Path,
    load: Path,
    out: Path,
    given: Path | None,
    sample: Path | None,
    ignored: Sequence[str] = (),
) -> None:
    """Write source.json and hf/ into `out`; ConvertError if `load` is not a model.

    `given` is the tokenizer's folder; if None, `find_tokenizer` searches it. `ignored` are unknown
    arguments of the checkpoint that the user accepts.
    """
    checkpoint = find_checkpoint(tree, load, out)
    args, _ = convert.published_args(tree, checkpoint, ignored)
    shape, dtype = shape_of_args(args), dtype_of_args(args)
    check_size("The checkpoint", shape)
    sequence = context_of("The checkpoint", args)
    tokenizer = given or find_tokenizer(load, args, sample)
    flags = [*convert.program_flags(shape, sequence), *DTYPES[dtype]]
    config, hf_configs = config_of(shape, dtype, sequence), out / "hf"
    facts = {"checkpoint": str(checkpoint), "arguments": args, "flags": flags, "config": config}
    facts |= {"tokenizer": str(tokenizer.resolve()), "hf_configs": str(hf_configs)}
    (out / "source.json").write_text(json.dumps(facts), encoding="utf-8")
    hf_configs.mkdir()
    convert.write_configs(hf_configs, config, tokenizer)


def find_checkpoint(tree: Path, load: Path, out: Path) -> Path:
    """Return the folder of checkpoints at `load`; a Hugging Face folder is converted."""
    checkpoint = checkpoints_of(load)
    if is_hf_folder(load):
        convert.refuse_mamba(load)
        checkpoint = out / "converted"
        convert.hf_to_megatron(tree, load, checkpoint)
    expected = "Megatron's checkpoints, a run, or a Hugging Face folder with a config.json"
    require_tracker(checkpoint, ConvertError, expected)
    return checkpoint


def find_tokenizer(load: Path, args: dict[str, Any], sample: Path | None) -> Path:
    """Return the first folder with a tokenizer: `load`, the training's, or `sample`."""
    trained = args.get("tokenizer_model")
    places = [path for path in (load, trained and Path(trained), sample) if path]
    for path in places:
        if (path / TOKENIZER).is_file():
            return path
    raise ConvertError(
        f"There is no {TOKENIZER} in {', nor in '.join(map(str, places))}",
        help="Pass the tokenizer's folder with --tokenizer-model",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; on an error print one paragraph and exit with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name in ("tree", "load", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("tokenizer", "sample"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument(IGNORE_FLAG, action="append", default=[], dest="ignored")
    args = parser.parse_args(argv)
    places = args.tree, args.load, args.out, args.tokenizer, args.sample
    guarded(lambda: write(*places, args.ignored))


if __name__ == "__main__":
    main()
