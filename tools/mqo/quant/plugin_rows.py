"""Declare the quantizers of a run, whose code is not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import PurePosixPath
from typing import Any

from mqo.quant.formats import source_types
from mqo.quant.plugins import PLUGINS, Options, Plugin, register_plugin

_SHOWN = 6  # digits of a digest in labels


def check_free(name: str) -> None:
    """Raise ValueError if a quantizer has the name of a type of mqo."""
    if name in source_types():
        raise ValueError(f"'{name}' is the name of a type of mqo; valid: another name")


def declare(plugin: Plugin) -> None:
    """Make a quantizer a type of which only the declaration is known.

    A registered function stays if it declares the same.
    """
    if PLUGINS.get(plugin.name) != plugin:
        register_plugin(replace(plugin, function=None, update=None, estimate=None))


@dataclass(frozen=True)
class PluginRow:
    """A row of [plugins] in quant.toml: a quantizer of a run.

    Attributes:
        file: the file that defines it, relative to quant.toml; None if no function is called.
        digest: a hash of this file and of the local modules that it imports.
        declared: what it declares.
        options: its options that differ from the defaults.
    """

    file: str | None = None
    digest: str = ""
    declared: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The start of the digest, which names the version in labels."""
        return self.digest[:_SHOWN]

    @property
    def text(self) -> str:
        """The version and the options, as checkpoints keep them."""
        options = [f"{name} {value}" for name, value in sorted(self.options.items())]
        return ", ".join([f"version {self.version}", *options])

    def declare(self, name: str) -> None:
        """Make the quantizer a type; raise ValueError for an invalid row."""
        check_free(name)
        kinds = {"file": str | None, "digest": str, "declared": Mapping, "options": Mapping}
        for key, kind in kinds.items():
            if not isinstance(value := getattr(self, key), kind):
                raise ValueError(f"invalid {key} {value!r} of {name}; valid: a text or a table")
        path = PurePosixPath(self.file or "")
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"invalid file {self.file!r} of {name}; valid: one in the run's folder"
            )
        try:
            plugin = Plugin(name, **self.declared)
        except TypeError:
            raise ValueError(f"unknown key in the declaration of {name}") from None
        plugin.with_defaults(self.options)
        declare(plugin)

    def as_table(self) -> dict[str, Any]:
        """Return the row for quant.toml, without empty values."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}
