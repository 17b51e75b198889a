"""Read what a Python file declares with @quantizer, without running it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any

from mqo.quant.plugin_rows import check_free
from mqo.quant.plugins import Plugin

DECORATOR = "quantizer"
# Packages that a file imports from their own place, whatever its folder holds.
_ELSEWHERE = ("mqo", "torch")
# {argument of the decorator, besides the name: field}
_FIELDS = {name: name for name in ("block", "square", "stochastic", "independent_rows")}
_FIELDS |= {"needs_amax": "needs_tensor_amax", "options": "options", "state": "state"}
_MOST_BYTES = 1 << 24


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


def local_files(path: Path) -> list[Path]:
    """Return the file, and the modules of its folder that it imports, directly or not."""
    folder, files, rest = path.parent, [path], [path]
    while rest:
        importing = rest.pop()
        package = importing.relative_to(folder).parent.parts
        for name in _imports(_tree(importing), package):
            for file in _modules(folder, name):
                if file not in files:
                    files.append(file)
                    rest.append(file)
    return files


def digest_of(path: Path) -> str:
    """Return a hash of the content of a file and of the local modules that it imports."""
    digest = hashlib.sha256()
    for file in sorted(local_files(path)):
        content = hashlib.sha256(_read(file)).digest()
        digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0" + content)
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


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted names that a module of `package` imports; of 'from a import b' a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _modules(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files below `folder` that an import of `name` runs."""
    parts = name.split(".")
    if parts[0] in _ELSEWHERE:
        return
    for end in range(1, len(parts) + 1):
        base = folder.joinpath(*parts[:end])
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                yield file
