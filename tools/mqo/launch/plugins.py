"""The custom quantizers in a run: their files, digests and options.

The launcher never runs a file of quantizers. It copies the file into the run's folder, and the
training program, which the command starts, runs the copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from os.path import realpath
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from mqo.errors import PluginError
from mqo.launch.options import SWITCHES
from mqo.matrix.tables import check_choice
from mqo.quant.own_formats import FormatRow
from mqo.quant.plugin_modules import digest_of, local_files, location_of
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import Plugin, is_value
from mqo.quant.recipe import Recipe
from mqo.recipes.quantizers import declare_file
from mqo.runs import RunFolder


class RunPlugin(BaseModel):
    """A custom quantizer in a run.

    `file` is relative to the run's folder, and `source` is the user's file when the run began. The
    `digest` covers it and the local modules that it imports. `options` differ from the defaults.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    file: str
    source: Path
    digest: str
    declared: dict[str, Any] = {}
    options: dict[str, Any] = {}

    def row(self) -> PluginRow:
        """Return its row in quant.toml."""
        return PluginRow(self.file, self.digest, self.declared, self.options)

    @property
    def label(self) -> str:
        """Return its version and options, for the name of a run."""
        words = [f"{name}={shown(value)}" for name, value in sorted(self.options.items())]
        return " ".join([self.row().version, *words])


class Quantizes(Protocol):
    """A run's quantization: its user's formats, its custom quantizers, and all its types."""

    @property
    def formats(self) -> Mapping[str, FormatRow]:
        """Return the user's formats that the run may use, by name."""

    @property
    def plugins(self) -> tuple[RunPlugin, ...]:
        """Return the custom quantizers that the run may use."""

    @property
    def all_types(self) -> set[str]:
        """Return the types of the run, at any step."""


def labels(run: Quantizes) -> list[str]:
    """Return the versions of a run's types, formats of the user and quantizers with options."""
    types = run.all_types
    own = [row.version for name, row in run.formats.items() if name in types]
    return own + [plugin.label for plugin in run.plugins if plugin.name in types]


def toml_rows(plugins: Iterable[RunPlugin]) -> dict[str, dict[str, Any]]:
    """Return [plugins] of quant.toml."""
    return {plugin.name: plugin.row().as_table() for plugin in plugins}


def declare_rows(plugins: Iterable[Any]) -> None:
    """Make the quantizers of a run's record types; ValueError for a damaged record."""
    if not isinstance(plugins, list | tuple):
        raise ValueError(f"plugins = {plugins!r} is not a list")
    for plugin in plugins:
        read = plugin if isinstance(plugin, RunPlugin) else RunPlugin.model_validate(plugin)
        read.row().declare(read.name)


def plugins_of(
    files: Iterable[Path],
    options: Iterable[str] = (),
    recipe: Recipe | None = None,
) -> tuple[RunPlugin, ...]:
    """Return the quantizers of files, which become types, with options as NAME.OPTION=VALUE.

    Those of a recipe follow; the options override its own.

    Raises:
        PluginError: a file declares no quantizer or imports a module that is not Python, two files
            have the same name or quantizer, or an option is invalid.
    """
    plugins: dict[str, RunPlugin] = {}
    known: dict[str, Plugin] = {}
    named = [*files, *map(Path, recipe.plugins if recipe else ())]
    files = list(dict.fromkeys(Path(realpath(path)) for path in named))
    for path in files:
        folder, file = _copy_of(path)
        twins = [str(other) for other in files if _copy_of(other)[0] == folder and other != path]
        if twins:
            raise PluginError(
                f"{path} and {twins[0]} have the same name", expected="files with different names"
            )
        for name, plugin in declare_file(path).items():
            if name in plugins:
                raise PluginError(
                    f"{path} and {plugins[name].source} both define the quantizer {name}",
                    expected="one of them",
                )
            known[name] = plugin
            plugins[name] = RunPlugin(
                name=name,
                file=f"{folder}/{file}",
                source=path,
                digest=_digest(path),
                declared=plugin.declaration,
            )
    chosen: dict[str, dict[str, Any]] = {}
    if recipe is not None:
        chosen |= {n: {**o} for n, o in recipe.plugin_options.items()}
    for text in options:
        name, option, value = chosen_option(text, known)
        chosen.setdefault(name, {})[option] = value  # the last text of an option decides
    for name, values in chosen.items():
        other = {key: v for key, v in values.items() if v != known[name].options[key]}
        plugins[name] = plugins[name].model_copy(update={"options": other})
    return tuple(plugins.values())


def _copy_of(path: Path) -> tuple[str, str]:
    """Return the folder in a run for a file and its modules, and the file's name in it."""
    try:
        location = location_of(path)
    except ValueError as error:
        raise _unreadable(path, error) from None
    return f"plugins/{location.full_name}", path.relative_to(location.base).as_posix()


def _digest(path: Path) -> str:
    try:
        return digest_of(path)
    except ValueError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: ValueError) -> PluginError:
    return PluginError(
        f"The modules that {path} imports cannot be read: {error}", expected="files of Python"
    )


def chosen_option(text: str, known: Mapping[str, Plugin]) -> tuple[str, str, Any]:
    """Return quantizer, option and value of a text NAME.OPTION=VALUE.

    Raises:
        UnknownNameError: the quantizer is not known, or has no such option.
        PluginError: no quantizer is known, the text has another form, or its value has another type
            than the default.
    """
    name, option, word = split_option(text)
    check_known(name, known)
    check_choice(f"option of {name}", option, known[name].options)
    return name, option, _value(text, word, known[name].options[option])


def check_known(name: str, known: Collection[str]) -> None:
    """Raise UnknownNameError for an unknown custom quantizer, PluginError if all are."""
    if not known:
        raise PluginError(
            f"An option of a quantizer {name} was given, but no file of quantizers",
            expected="--plugin FILE, or a recipe that names one",
        )
    check_choice("quantizer of a --plugin", name, known)


def split_option(text: str) -> tuple[str, str, str]:
    """Return the parts of NAME.OPTION=VALUE; PluginError for another text."""
    path, equals, word = text.partition("=")
    name, dot, option = path.strip().partition(".")
    if not (equals and dot and name and option):
        raise PluginError(f"The option '{text}' is not valid", expected="NAME.OPTION=VALUE")
    return name, option, word.strip()


def _value(text: str, word: str, default: Any) -> Any:
    """Return a word as a value of the default's type."""
    kind = type(default)
    if kind is bool and word in SWITCHES:
        return SWITCHES[word]
    try:
        if kind is not bool and is_value(value := kind(word)):
            return value
    except ValueError:
        pass
    expected = "true or false" if kind is bool else f"a value like {default!r}"
    raise PluginError(f"The option '{text}' has no valid value", expected=expected)


def shown(value: Any) -> str:
    """Return the value of an option as `--plugin-option` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def used(plugins: Iterable[RunPlugin], types: Collection[str]) -> tuple[RunPlugin, ...]:
    """Return the quantizers of the files of which a run uses one; `types` are those of the run.

    A file registers all its quantizers, so the others are in the run's records as well.
    """
    plugins = tuple(plugins)
    files = {plugin.file for plugin in plugins if plugin.name in types}
    return tuple(plugin for plugin in plugins if plugin.file in files)


def copy_files(plugins: Iterable[RunPlugin], folder: RunFolder) -> None:
    """Copy the files of quantizers, and the modules that they import, into a run's folder.

    Raises:
        PluginError: a file is gone, or has changed since its digest was recorded.
    """
    for path, target in {p.source: folder.root / p.file for p in plugins}.items():
        try:
            base = location_of(path).base
            top = target.parents[len(path.relative_to(base).parts) - 1]
            for file in local_files(path):
                copy = top / file.relative_to(base)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
            digest = digest_of(target)
        except ValueError as error:  # not Python any more, or gone
            raise PluginError(
                f"A file of quantizers has changed since the run was planned: {error}",
                expected="no change",
            ) from None
        if {digest} != {plugin.digest for plugin in plugins if plugin.source == path}:
            raise PluginError(f"{path} has changed since the run was planned", expected="no change")
