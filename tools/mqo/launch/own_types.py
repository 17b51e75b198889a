"""The user's types of a command line: formats of --formats, and quantizers of --plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

from mqo.errors import FormatError, PluginError
from mqo.launch.own_formats import declare_format_files, own_rows
from mqo.launch.plugins import Quantizes, split_option
from mqo.quant.own_formats import FormatRow
from mqo.recipes.quantizer_packages import files_of
from mqo.recipes.quantizers import declare_file


@dataclass(frozen=True)
class OwnTypes:
    """The files of --formats with their names of types, and all formats of the user.

    `plugins` are the files of --plugin, `options` the texts of --plugin-option.
    """

    formats: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    rows: Mapping[str, FormatRow] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()

    @classmethod
    def from_options(
        cls,
        formats: Iterable[Path] | None = None,
        plugins: Iterable[Path] | None = None,
        options: Iterable[str] | None = None,
    ) -> OwnTypes:
        """Return those of a command line, which become types, with those of `users_file`.

        A plugin may be the name of an entry point of a package.

        Raises:
            FormatError: see `declare_format_files`.
            PluginError: a file declares no quantizer.
        """
        names = declare_format_files(formats or ())
        files = files_of(plugins)
        for file in files:
            declare_file(file)
        return cls(names, own_rows(), files, tuple(options or ()))

    def file_of(self, name: str) -> Path | None:
        """Return the file of --formats that defines a format; None if none does."""
        return next((file for file, names in self.formats.items() if name in names), None)

    def refuse_unused(self, runs: Sequence[Quantizes]) -> None:
        """Raise FormatError or PluginError for a file or an option that no run uses.

        An option is used if its quantizer is a type of a run.
        """
        self.refuse_unused_in({name for run in runs for name in run.formats})
        sources = {plugin.source for run in runs for plugin in run.plugins}
        for file in self.plugins:
            if Path(realpath(file)) not in sources:
                names = " and ".join(declare_file(file))
                raise PluginError(
                    f"--plugin {file} changes nothing: no operand is of type {names}",
                    expected="a mode, a recipe or a schedule with this type",
                )
        types = {name for run in runs for name in run.all_types}
        for text in self.options:
            if (name := split_option(text)[0]) not in types:
                raise PluginError(
                    f"--plugin-option {text} changes nothing: no operand is of type {name}",
                    expected="an option of a quantizer that is used",
                )

    def refuse_unused_in(self, types: Set[str]) -> None:
        """Raise FormatError for a file of which no format is among these types."""
        for file, names in self.formats.items():
            if not types & {*names}:
                raise FormatError(
                    f"--formats {file} changes nothing: no operand is of type {' or '.join(names)}",
                    expected="a mode, a recipe or a schedule with this type",
                )


NO_OWN_TYPES = OwnTypes()
