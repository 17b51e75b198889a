"""Read the model of a run: a published one by its name, or the user's own by its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mqo.errors import MqoError, UnknownNameError
from mqo.launch.hf_config import context_of, shape_of_config
from mqo.launch.hf_source import CONFIG
from mqo.launch.naming import check_own
from mqo.launch.size import check_numbers
from mqo.matrix import tables
from mqo.matrix.tables import Model, Shape
from mqo.scale.weights import total_weights
from mqo.untrusted import read_json_object, read_toml, reading

_TOML, _JSON = ".toml", ".json"
_CONTEXT = "train_sequence"
_EXPECTED = f"a file or folder with a Hugging Face {CONFIG}, or FILE{_TOML}"


def own_file(given: str) -> Path | None:
    """Return the absolute path of a model's file; None for a name of models.toml."""
    path = Path(given)
    if given in tables.models():
        return None
    if "/" not in given and path.suffix not in (_JSON, _TOML) and not path.exists():
        return None
    path = path.expanduser().absolute()
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise MqoError(f"The model {file} does not exist", expected=_EXPECTED)
    return file


def model_of(given: str, name: str | None = None) -> tuple[Model, Path | None]:
    """Return a model, and the file that describes it if it is the user's own.

    Args:
        given: a name of models.toml, or a path as in `own_file`.
        name: the user's name for an own model; by default that of its folder or file.

    Raises:
        UnknownNameError: there is neither a model nor a file of that name.
        MqoError: the file does not describe a model that Megatron's flags express.
    """
    file = own_file(given)
    if file is not None:
        return _read(file, name), file
    try:
        return tables.pick(tables.models(), "model", given), None
    except UnknownNameError as error:
        raise UnknownNameError(
            "model", given, [*tables.models()], help=f"Or {_EXPECTED}"
        ) from error


def expand_models(given: str) -> list[str]:
    """Return the models of a list as in `tables.expand`, in which a part may be a path.

    'all' and globs match only models with scripts, if any match.
    """
    names: dict[str, None] = {}
    published, first = tables.models(), tables.script_models()
    for part in (part.strip() for part in given.split(",")):
        is_own = own_file(part) is not None
        matches = [part] if is_own else tables.expand("model", published, part, first)
        names |= dict.fromkeys(matches)
    return list(names)


def shrink_of(text: str | None) -> tuple[int, int] | None:
    """Return the divisors of width and depth in a text 'W,D'."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise MqoError(
            f"--shrink {text} is not valid",
            expected="W,D: divisors of width and depth, such as 4,2",
        )
    width, depth = map(int, words)
    return width, depth


def _read(file: Path, name: str | None) -> Model:
    """Return the user's own model."""
    own = name or (file.parent.name if file.name == CONFIG else file.stem)
    check_own("model", own)
    if own in tables.models():
        raise MqoError(
            f"The model in {file} has the name of a published one, {own}",
            expected="another name",
            help="Pass --name NAME",
        )
    if file.suffix == _TOML:
        return _of_toml(file, own)
    with reading(MqoError):
        config = read_json_object(file)
    shape, context = shape_of_config(config), context_of(CONFIG, config)
    return _model(file, own, shape, context)


def _of_toml(file: Path, name: str) -> Model:
    """Return the model of a table with the keys of a row in models.toml."""
    with reading(MqoError):
        table = read_toml(file)
    context = table.pop(_CONTEXT, None)
    if type(context) is not int or context < 1:
        raise MqoError(f"{file} has {_CONTEXT} = {context!r}", expected="a number of tokens")
    try:
        return _model(file, name, Shape(**table), context)
    except ValidationError as error:
        raise MqoError(
            f"{file}: {_fault(error)}",
            expected=f"{_CONTEXT} and these keys: {', '.join(Shape.model_fields)}",
        ) from None


def _model(file: Path, name: str, shape: Shape, context: int) -> Model:
    check_numbers(str(file), shape)
    fields: dict[str, Any] = {key: getattr(shape, key) for key in Shape.model_fields}
    parameters = total_weights(shape)
    return Model(
        name=name, published_as=None, parameters=parameters, train_sequence=context, **fields
    )


def _fault(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the table'}: {first['msg']}"
