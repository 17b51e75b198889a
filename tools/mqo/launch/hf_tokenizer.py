"""Choose the tokenizer of a converted model, copy its files, and read its special ids."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mqo.data.pair_check import vocabulary_size
from mqo.errors import ConvertError
from mqo.launch.folder import environment_of
from mqo.launch.inputs import Inputs
from mqo.megatron.run import foreign_tokenizer
from mqo.runs import RunFolder
from mqo.untrusted import Limit, check_tokenizer, copy_file, read_json_object, reading

Id = int | list[int] | None

VOCABULARIES, CONFIG, FILES = (
    foreign_tokenizer.VOCABULARIES,
    foreign_tokenizer.CONFIG,
    foreign_tokenizer.FILES,
)
GENERATION = "generation_config.json"
# Names of code that transformers would fetch or run.
CODE = "auto_map"
SPECIAL = ("bos", "eos", "pad")
TYPE = "HuggingFaceTokenizer"


def choose(
    given: Path | None, args: Mapping[str, Any], run: RunFolder | None
) -> tuple[Path | None, str]:
    """Return the folder of the tokenizer and '', or None and a note that explains why.

    It is `given`, by default the tokenizer of the checkpoint's training. `args` are the arguments
    of the checkpoint, `run` is the run that wrote it, if known.

    Raises:
        ConvertError: `given` holds no tokenizer.
    """
    if given is not None:
        if not _is_tokenizer(given):
            raise ConvertError(
                f"The folder {given} does not exist"
                if not given.is_dir()
                else f"{given} holds no tokenizer",
                expected=f"a folder with {' or '.join(VOCABULARIES)}",
            )
        return given, ""
    trained_with, kind = args.get("tokenizer_model"), args.get("tokenizer_type")
    folder = Path(trained_with or "")
    folder = folder.parent if folder.is_file() else folder
    if not trained_with:
        note = "The checkpoint names no tokenizer"
    elif kind != TYPE:
        note = f"The model was trained with a {kind}, which transformers cannot load"
    elif not _is_tokenizer(folder):
        note = f"The tokenizer of the training, {trained_with}, does not exist"
    elif changed := _changed(folder, run):
        note = f"The tokenizer of the training has changed: {'; '.join(changed)}"
    else:
        return folder, ""
    without = "The folder lacks the tokenizer that AutoTokenizer and pipeline need"
    return None, f"{note}. {without}: --tokenizer FOLDER adds one."


def _is_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def _changed(folder: Path, run: RunFolder | None) -> list[str]:
    """Return how the tokenizer's files differ from the run's record; nothing without a record."""
    facts = environment_of(run) if run else None
    marks = facts.inputs.files if facts else {}
    own = {str((folder / name).absolute()) for name in FILES}
    return Inputs({path: mark for path, mark in marks.items() if path in own}).changed()


def class_note(tokenizer: Path | None, tokenizer_class: str) -> str:
    """Return a note if transformers reads the tokenizer with a class that is not its own.

    `tokenizer_class` is the class that transformers uses for the architecture, "" for its own.
    """
    if tokenizer is None or not tokenizer_class:
        return ""
    config = read_json(tokenizer / CONFIG) if (tokenizer / CONFIG).is_file() else {}
    own = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if own == tokenizer_class:
        return ""
    return (
        f"AutoTokenizer reads the tokenizer of this architecture as a {tokenizer_class}, which may "
        "split text differently. Load it with transformers.PreTrainedTokenizerFast.from_pretrained."
    )


def rows(args: Mapping[str, Any], stored: int, tokenizer: Path | None) -> tuple[int, str]:
    """Return the number of embedding rows that are tokens, and a note if that is uncertain.

    `stored` is the number of rows in the checkpoint or in its arguments. A training pads the
    tokenizer's vocabulary to a multiple; this function removes the padding.

    Raises:
        ConvertError: the tokenizer has tokens that the model does not know.
    """
    size = vocabulary_size(tokenizer) if tokenizer else None
    if size is None:
        return stored, ""
    if size > stored:
        raise ConvertError(
            f"The tokenizer at {tokenizer} has {size:,} tokens, and the model {stored:,} rows",
            expected="the tokenizer that the model was trained with",
            help=f"Pass it with --tokenizer FOLDER, or keep this one with --vocab-size {stored}",
        )
    if args.get("vocab_size"):  # the checkpoint records the number of tokens
        return stored, ""
    multiple = _size(args, "make_vocab_size_divisible_by")
    multiple *= _size(args, "tensor_model_parallel_size")
    if -(-size // multiple) * multiple != stored:
        kept = "more than padding explains: all rows are kept. --vocab-size N removes some."
        return stored, f"The model has {stored:,} rows for {size:,} tokens, {kept}"
    return size, ""


def _size(args: Mapping[str, Any], name: str) -> int:
    size = args.get(name) or 1
    if not isinstance(size, int) or size < 1:
        raise ConvertError(f"The checkpoint has {name} = {size!r}", expected="a number above 0")
    return size


def special_ids(tokenizer: Path | None) -> dict[str, Id]:
    """Return {bos_token_id, eos_token_id, pad_token_id} of a tokenizer's folder.

    They are the tokenizer's own, so that generation stops at the token that ends a document in the
    training data. A model's config.json in the folder supplies ids that the tokenizer lacks.
    Without a value, transformers would use its own defaults.
    """
    own = _own_ids(tokenizer) if tokenizer else {}
    model = _optional(tokenizer, "config.json")
    keys = [f"{name}_token_id" for name in SPECIAL]
    return {key: _either(own.get(key), model.get(key)) for key in keys}


def generation_config(tokenizer: Path | None, ids: Mapping[str, Id]) -> dict[str, Any]:
    """Return the content of generation_config.json; empty if no setting is known.

    Settings of a published model in the tokenizer's folder are kept.
    """
    model = _optional(tokenizer, GENERATION)
    kept = {k: value for k, value in model.items() if k not in (CODE, "_from_model_config")}
    own = {name: _either(value, kept.get(name)) for name, value in ids.items()}
    return kept | {name: value for name, value in own.items() if value is not None}


def _either(own: Id, model: Id) -> Id:
    """Return the tokenizer's id, or the model's list of ids if that includes it."""
    several = isinstance(model, list) and own in model
    return model if own is None or several else own


def _own_ids(folder: Path) -> dict[str, Id]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    from tokenizers import Tokenizer

    with reading(ConvertError):
        check_tokenizer(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConvertError(
            f"{path} cannot be read: {error}", expected="a file of the package tokenizers"
        ) from None
    named = _optional(folder, "special_tokens_map.json") | _optional(folder, CONFIG)
    ids: dict[str, Id] = {}
    for name in SPECIAL:
        token = named.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        ids[f"{name}_token_id"] = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return ids


def copy(tokenizer: Path, stage: Path, names: Collection[str] = FILES) -> None:
    """Copy the files of these names into `stage`; references to code are left out."""
    with reading(ConvertError):
        for path in (tokenizer / name for name in names):
            if os.path.lexists(path):
                copy_file(path, stage / path.name, within=tokenizer, limit=Limit.TOKENIZER)
    for name in {CONFIG, GENERATION}.intersection(names):
        config = _optional(stage, name)
        if CODE in config:
            del config[CODE]
            write_json(stage / name, config)


def _optional(folder: Path | None, name: str) -> dict[str, Any]:
    path = folder and folder / name
    return read_json(path) if path and path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ConvertError if there is none."""
    with reading(ConvertError):
        return read_json_object(path, within=path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
