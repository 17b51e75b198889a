"""The vocabulary of site patches: what to find in which scope, and how to change it.

These are plain data without LibCST, so that patches load fast; `rewrite` applies them. A
pattern is a Python expression or statement, compared by structure: white space, comments, quotes
and redundant parentheses do not count. `...` as the last argument of a call matches any other
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from packaging.specifiers import SpecifierSet


def covers(versions: str, version: str) -> bool:
    """Return whether a range of releases, such as ">=0.14", holds `version`; "" holds any."""
    return SpecifierSet(versions).contains(version, prereleases=True)


@dataclass(frozen=True)
class Anchor:
    """A pattern and the exact number of times it must occur in its scope.

    `versions` (a specifier such as ">=0.14") are the upstream releases that have this form; it is
    not searched for in others.
    """

    pattern: str
    count: int = 1
    versions: str = ""


@dataclass(frozen=True)
class InsertBefore:
    """Put `code` before the statement that holds the anchors.

    With several anchors: in the innermost block that encloses them all, before the first of its
    statements that holds one.
    """

    scope: str
    anchors: tuple[Anchor, ...]
    code: str


@dataclass(frozen=True)
class WrapOperands:
    """In each match, replace name N by `wrappers[N](N)`; each N must occur there exactly once.

    With `function`, matches are calls `f(x, y)` of such operands, which become `function(f)(x, y)`;
    a method of an operand, as in `x.f(y)`, becomes `function(torch.f)(x, y)`.
    """

    scope: str
    anchors: tuple[Anchor, ...]
    wrappers: Mapping[str, str]
    function: str = ""


@dataclass(frozen=True)
class ReplaceExpression:
    """Replace each match by the expression `code`."""

    scope: str
    anchor: Anchor
    code: str


@dataclass(frozen=True)
class PrependBody:
    """Insert `code` at the start of the body of the function `scope`, after its docstring.

    With `scope` "" it goes to the start of the module, after imports from `__future__`.
    """

    scope: str
    code: str


@dataclass(frozen=True)
class AddParameters:
    """Give the function `scope` the parameters `code` after its last positional one.

    It is drift if the function already has one of them.
    """

    scope: str
    code: str


@dataclass(frozen=True)
class AddImport:
    """Add `code`, an import and code that needs it, after the module's first run of imports."""

    code: str
    scope: ClassVar[str] = ""


# `scope` is the dotted path of the function that an edit is confined to: "Class.method".
Edit = InsertBefore | WrapOperands | ReplaceExpression | PrependBody | AddParameters | AddImport


@dataclass(frozen=True)
class FileEdits:
    """The edits of one file, in order.

    `versions` are the upstream releases that have the file; `package` is the part of upstream
    ("megatron/training") without which a tree does not need these edits.
    """

    path: str
    edits: tuple[Edit, ...]
    versions: str = ""

    @property
    def package(self) -> str:
        """Return the file's upstream package: "megatron/core" or "megatron/training"."""
        return "/".join(self.path.split("/")[:2])
