"""Damage files and folders as a hostile author, a broken disk or another program could.

Each function takes a random source and a path and returns the name of what it did. The content of a
pickle that would run code makes the file `marker`.
"""

from __future__ import annotations

import builtins
import gzip
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..mqo.damage import changed

NESTED = 200_000
SPARSE = 1 << 42  # bytes of a file without content
BOMB = 1 << 28  # bytes that a small archive expands to
VALUES = (
    *(None, True, -1, 0, 1e308, float("nan"), float("inf"), 2**70, 10**9, "", "nan", "64"),
    *("x" * 100_000, "\0", "../..", "/dev/zero", "/etc/passwd", "a\x1b[2Jb", "\ud800"),
    *([], {}, [[]], {"a": {"b": [1]}}, [1] * 1000, "{{ 7 * 7 }}", "os.system('true')"),
)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., object], *words: object) -> None:
        self.function, self.words = function, words

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.words


def calls(marker: Path) -> dict[str, Call]:
    """Return objects whose pickles run code that makes `marker`, by name."""
    name = str(marker)
    code = f"open({name!r}, 'w')"
    return {
        "os.system": Call(os.system, f"touch '{name}'"),
        "exec": Call(builtins.exec, code),
        "eval": Call(builtins.eval, code),
        "open": Call(builtins.open, name, "w"),
        "check_call": Call(subprocess.check_call, ["touch", name]),
        "copyfile": Call(shutil.copyfile, "/dev/null", name),
        "mkdir": Call(os.mkdir, name),
        "touch": Call(Path.touch, Path(name)),
        "within a pickle": Call(pickle.loads, pickle.dumps(Call(os.system, f"touch '{name}'"))),
    }


def allocations() -> dict[str, object]:
    """Return objects whose pickles ask for more memory than a machine has, by name."""
    return {
        "a terabyte": Call(bytearray, 10**12),
        "100 GB of a list": Call(list, Call(range, 10**10)),
        "a tensor's size": {"step": Call(bytes, 10**11)},
    }


def as_pickle(draw: random.Random, value: object) -> bytes:
    """Return a pickle, sometimes inside of other values, in one of the protocols."""
    value = draw.choice((value, [None, value], {"a": value}, ({1: [value]},)))
    return pickle.dumps(value, draw.choice((0, 2, 4, 5)))


def nested_pickle() -> bytes:
    """Return a pickle of lists in lists."""
    return b"\x80\x04" + b"]" * NESTED + b"a" * (NESTED - 1) + b"."


# -- any file --------------------------------------------------------------------------------------


def _pipe(draw: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("/dev/zero", "/dev/tty", "/etc/passwd", path.name, "/proc/kmsg")))


def _link_outside(draw: random.Random, path: Path) -> None:
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def _folder(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _cut(draw: random.Random, path: Path) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def _flip(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 4, 100)) if content else 0):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _insert(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    more = draw.choice((b"\xff", b"\0" * 9, b"{{{", b"1e999", b"cposix\nsystem\n", b"9" * 5000))
    path.write_bytes(content[:at] + more + content[at + draw.randrange(9) :])


def _nest(draw: random.Random, path: Path) -> None:
    texts = (b"[" * NESTED, b'{"a":' * NESTED, b"[" * NESTED + b"]" * NESTED, nested_pickle())
    path.write_bytes(draw.choice(texts))


def _grow(draw: random.Random, path: Path) -> None:
    os.truncate(path, draw.choice((SPARSE, 1 << 34, 1 << 29)))


def _bomb(draw: random.Random, path: Path) -> None:
    zeros = bytes(BOMB)
    if draw.random() < 0.3:
        path.write_bytes(gzip.compress(zeros, 1))
        return
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("archive/data.pkl", "archive/byteorder", "archive/data/0"):
            archive.writestr(name, zeros)


def _values(draw: random.Random, path: Path) -> None:
    """Replace values of JSON; flip bytes of another file."""
    try:
        lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
        at = draw.randrange(len(lines))
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _flip(draw, path)
    for _ in range(draw.choice((1, 1, 2))):
        value = replaced(draw, value) if draw.random() < 0.7 else changed(draw, value)
    lines[at] = json.dumps(value).encode()
    path.write_bytes(b"\n".join(lines))


def replaced(draw: random.Random, value: object) -> object:
    """Return a JSON value with one part of it, at any depth, replaced by one of VALUES."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    value[key] = replaced(draw, value[key])
    return value


DAMAGES = (_pipe, _link, _link_outside, _folder, _cut, _flip, _insert, _nest, _grow, _bomb)
DAMAGES += (_values,) * 8
BINARY = DAMAGES[:-8]


def damage_file(draw: random.Random, path: Path, kinds: tuple = DAMAGES) -> str:
    """Damage a file; return the kind and the file's name."""
    kind = draw.choice(kinds)
    kind(draw, path)
    return f"{kind.__name__.lstrip('_')} {path.name}"


def damage_one(draw: random.Random, folder: Path, names: tuple[str, ...] = ("*",)) -> str:
    """Damage one regular file below a folder that matches one of the patterns, if there is one."""
    files = sorted({path for name in names for path in folder.rglob(name) if is_small(path)})
    return damage_file(draw, draw.choice(files)) if files else "nothing"


def is_small(path: Path) -> bool:
    """Return whether the path is a regular file that an earlier damage did not make huge."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < BOMB


def pickle_file(draw: random.Random, path: Path, marker: Path, dump: Callable) -> str:
    """Replace a file by a pickle that would run code or allocate; `dump` writes torch's form."""
    table = calls(marker) | allocations()
    name = draw.choice(sorted(table))
    if draw.random() < 0.5:
        path.write_bytes(as_pickle(draw, table[name]))
    else:
        file = io.BytesIO()
        dump({"model": table[name]}, file)
        path.write_bytes(file.getvalue())
    return f"{name} in {path.name}"
