"""Read what a Python file declares with @quantizer, without running it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from mqo.quant.plugin_rows import check_free
from mqo.quant.plugins import Plugin

DECORATOR = "quantizer"
# Packages that a file imports from their own place, whatever its folder holds.
_ELSEWHERE = ("mqo", "torch")
# {argument of the decorator, besides the name: field}
_SAME = ("block", "square", "stochastic", "independent_rows", "options", "state", "estimator")
_FIELDS = {name: name for name in _SAME} | {"needs_amax": "needs_tensor_amax"}
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


def declared(path: Path) -> dict[str, Plugin]:
    """Return {name: quantizer} of the functions with @quantizer at the top level of a file.

    Raises:
        ValueError: the file is not Python, an argument is not a literal, a declaration is invalid,
            or there is none; the text says which.
    """
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a file of Python; valid: a name that ends in .py")
    plugins: dict[str, Plugin] = {}
    for node in _tree(path).body:
        for call in _decorators(node):
            plugin = _plugin(path, call)
            if plugin.name in plugins:
                raise ValueError(f"{path} has two quantizers {plugin.name}")
            plugins[plugin.name] = plugin
    if not plugins:
        raise ValueError(f"{path} has no function with @{DECORATOR}('name')")
    return plugins


def location_of(path: Path) -> Location:
    """Return from where a file imports its own modules; ValueError if it cannot be read."""
    packages = _packages(path)
    names = packages if path.name == "__init__.py" and packages else [*packages, path.stem]
    full_name = ".".join(names)
    if packages and packages[0] not in _ELSEWHERE and _imports_from(_tree(path), packages[0]):
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
        tree, package = _tree(importing), importing.relative_to(location.base).parent.parts
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


def _tree(path: Path) -> ast.Module:
    content = _read(path)
    try:
        return ast.parse(content, filename=str(path))
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: {error.msg}, in line {error.lineno}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _decorators(node: ast.stmt) -> Iterator[ast.Call]:
    if not isinstance(node, ast.FunctionDef):
        return
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            name = decorator.func
            if getattr(name, "id", getattr(name, "attr", "")) == DECORATOR:
                yield decorator


def _plugin(path: Path, call: ast.Call) -> Plugin:
    where = f"@{DECORATOR} in line {call.lineno} of {path}"
    try:
        names = [ast.literal_eval(argument) for argument in call.args]
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, TypeError):
        raise ValueError(f"{where} has an argument that is not a literal") from None
    names += [given.pop("name")] if "name" in given else []
    if given.get("options", ()) is None:  # the decorator's default
        del given["options"]
    unknown = given.keys() - _FIELDS.keys()
    try:
        if unknown or len(names) != 1:
            raise TypeError
        fields: dict[str, Any] = {_FIELDS[name]: value for name, value in given.items()}
        plugin = Plugin(names[0], **fields)
        check_free(plugin.name)
    except TypeError:
        raise ValueError(f"{where} has an unknown argument, or no name") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return plugin


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
