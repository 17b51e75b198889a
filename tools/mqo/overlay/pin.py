"""UPSTREAM.toml, which pins the Megatron that this project patches, as a record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from mqo.overlay.schema import check_text, read_table, refusal

SCHEMA = 1
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?")
_PACKAGE = re.compile(r"megatron/[a-z_]+")
_PYTHON = re.compile(r"3\.[0-9]{1,2}")
_WHEEL = re.compile(rf"megatron_core-{_VERSION.pattern}-cp3[0-9]{{1,2}}(-[\w.]+)+\.whl", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Helper:
    """The release whose compiled dataset helper is used, if its C++ source is the same."""

    version: str
    pythons: tuple[str, ...]
    source: str
    source_sha256: str


@dataclass(frozen=True)
class Pin:
    """UPSTREAM.toml: the version, its trusted wheels, and the release with the helper.

    `verified_wheels` are the wheels of the other releases that `mqo verify` tries.
    """

    version: str
    packages: tuple[str, ...]
    pythons: tuple[str, ...]
    helper: Helper
    wheels: Mapping[str, str]
    verified_wheels: Mapping[str, str] = field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """Return {file name: SHA-256} of every trusted wheel."""
        return {**self.verified_wheels, **self.wheels}

    @property
    def releases(self) -> list[str]:
        """Return the releases with a trusted wheel, oldest first."""
        return sorted({name.split("-")[1] for name in self.digests}, key=Version)

    @classmethod
    def load(cls, path: Path) -> Pin:
        """Read UPSTREAM.toml; TableError if it does not fit the schema."""
        pin = read_table(path, cls, SCHEMA)
        _check(pin, path)
        return pin


def _check(pin: Pin, path: Path) -> None:
    """Refuse texts of another form, above all paths outside of upstream's packages."""
    check_text(_VERSION, pin.version, path, "version", "0.19.2")
    check_text(_VERSION, pin.helper.version, path, "helper: version", "0.16.1")
    if not pin.packages or not pin.pythons:
        raise refusal(path, "packages or pythons is empty", "one name or more in each")
    for package in pin.packages:
        check_text(_PACKAGE, package, path, "packages", "megatron/core")
    for python in (*pin.pythons, *pin.helper.pythons):
        check_text(_PYTHON, python, path, "pythons", "3.12")
    for kind, wheels in (("wheels", pin.wheels), ("verified_wheels", pin.verified_wheels)):
        for name, digest in wheels.items():
            check_text(_WHEEL, name, path, kind, "megatron_core-0.19.2-cp312-cp312-any.whl")
            check_text(_SHA256, digest, path, f"{kind}, {name!r}", "64 hexadecimal digits")
