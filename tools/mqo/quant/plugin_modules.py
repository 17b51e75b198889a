"""Find the modules that a file of custom quantizers imports, which a run copies."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

# Packages that a file imports from their own place, whatever its folder holds.
_ELSEWHERE = ("mqo", "torch")
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Location:
    """From where a file imports its own modules.

    Attributes:
        base: the folder below which they are: that of the file; for a file that imports from the
            package that it is in, the folder with this package.
        package: this package, or '' for a file that is run by itself.
        module: the file's name in an import below `base`.
        full_name: its name as a module of all packages that it is in: 'package.mine', or 'mine'.
    """

    base: Path
    package: str
    module: str
    full_name: str


def location_of(path: Path) -> Location:
    """Return from where a file imports its own modules; ValueError if it cannot be read."""
    packages = _packages(path)
    names = packages if path.name == "__init__.py" and packages else [*packages, path.stem]
    full_name = ".".join(names)
    if packages and packages[0] not in _ELSEWHERE and _imports_from(read_module(path), packages[0]):
        return Location(path.parents[len(packages)], packages[0], full_name, full_name)
    return Location(path.parent, "", path.stem, full_name)


def local_files(path: Path) -> list[Path]:
    """Return the file, and its own modules that it imports, directly or not.

    These are the modules of its folder. If it imports from the package that it is in, they are
    those of the package.

    Raises:
        ValueError: a file cannot be read, or imports a module of its package that is not there.
    """
    location = location_of(path)
    files: list[Path] = []
    # An import of a module runs the packages that it is in first.
    rest = [path, *_modules(location, location.module)] if location.package else [path]
    while rest:
        importing = rest.pop()
        if importing in files:
            continue
        files.append(importing)
        tree, package = read_module(importing), importing.relative_to(location.base).parent.parts
        _check_imports(importing, tree, package, location)
        for names in _imports(tree, package):
            rest += [file for name in names for file in _modules(location, name)]
    return files


def digest_of(path: Path) -> str:
    """Return a hash of the content of a file and of the local modules that it imports."""
    digest, base = hashlib.sha256(), location_of(path).base
    for file in sorted(local_files(path)):
        content = hashlib.sha256(_read(file)).digest()
        digest.update(file.relative_to(base).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    """Return the content of a file, which a recipe from elsewhere may name; or raise ValueError."""
    try:
        facts = path.stat()
        # A pipe or a device would never end.
        if S_ISREG(facts.st_mode) and facts.st_size <= _MOST_BYTES:
            return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    raise ValueError(f"{path} cannot be read; valid: a file of at most {_MOST_BYTES} bytes")


def read_module(path: Path) -> ast.Module:
    """Return the syntax tree of a file; ValueError if it is not Python or cannot be read."""
    content = _read(path)
    try:
        return ast.parse(content, filename=str(path))
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: {error.msg}, in line {error.lineno}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _packages(path: Path) -> list[str]:
    """Return the names of the packages that a file is in, from the outermost."""
    names: list[str] = []
    folder = path.parent
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _imports_from(tree: ast.Module, package: str) -> bool:
    """Return whether a module imports from `package`, the outermost that it is in."""
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        return True
    return any(name.split(".")[0] == package for names in _imports(tree, ()) for name in names)


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the dotted names that each import in a module of `package` may run.

    For 'import a, b' they are a and b, and for 'from a import b' a and a.b.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _modules(location: Location, name: str) -> Iterator[Path]:
    """Yield the own files that an import of `name` runs."""
    parts = name.split(".")
    if parts[0] in _ELSEWHERE or (location.package and parts[0] != location.package):
        return
    for end in range(1, len(parts) + 1):
        base = location.base.joinpath(*parts[:end])
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                yield file


def _check_imports(
    path: Path, tree: ast.Module, package: tuple[str, ...], location: Location
) -> None:
    """Raise ValueError for an import at the top of a file that would fail in a run's copy.

    A file may catch the error of another one.
    """
    for node in tree.body:
        line = f"{path} imports {{}} in line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.level > len(package):
            name = "." * node.level + (node.module or "")
            raise ValueError(
                f"{line.format(name)}, and is in no package; valid: a folder with __init__.py, or "
                "`import NAME` of a module in the same folder"
            )
        if not (location.package and isinstance(node, ast.Import | ast.ImportFrom)):
            continue
        for names in _imports(node, package):
            for name in names if isinstance(node, ast.Import) else names[:1]:
                if name.split(".")[0] == location.package and not _is_python(location, name):
                    raise ValueError(
                        f"{line.format(name)}, which is not in Python below {location.base}; "
                        "valid: modules that a run can copy"
                    )


def _is_python(location: Location, name: str) -> bool:
    base = location.base.joinpath(*name.split("."))
    return base.is_dir() or base.with_suffix(".py").is_file()
