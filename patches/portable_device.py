"""Replace torch.cuda by mqo.megatron.device: the same object with CUDA, otherwise a facade.

This changes the expression `torch.cuda` (not imports, not annotations in strings), "cuda" as a
device argument, `.cuda()`, `torch.device("cuda...")`, and the type names that `Tensor.type()` is
compared with. It keeps `device.type == "cuda"` and `device_type="cuda"`, which only test.
"""

import ast
import re
from collections.abc import Iterable, Iterator

from mqo.errors import DriftError
from mqo.overlay.codemod import Codemod, Source, Splice, end_of
from mqo.overlay.drift import Place

DEVICE_KEYWORDS = {"device", "map_location"}
TYPE_NAME = re.compile(r"torch\.cuda\.\w*Tensor")


class _Rule(ast.NodeVisitor):
    """Collect the splices of one file, and the names that they need from the facade."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[Splice] = []
        self.needed: set[str] = set()

    def _put(self, node: ast.expr, text: str, name: str) -> None:
        self.found.append(Splice.over(node, text))
        self.needed.add(name)

    def visit(self, node: ast.AST) -> None:
        if self.source.concerns(node):
            super().visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_torch_cuda(node):
            self._put(node, "accelerator", "accelerator")
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if is_to_cuda(node):
            self._to_device(node)
            return
        if is_cuda_device(node):
            self._put(node.func, "accelerator_device", "accelerator_device")
        elif is_cuda_argument(node):
            self._put(node.args[0], "accelerator_type()", "accelerator_type")
        self.generic_visit(node)

    def _to_device(self, node: ast.Call) -> None:
        """Turn `x.cuda(rest)` into `x.to(accelerator_type(), rest)`; a given device is kept."""
        line, end = end_of(node.func)
        self.found.append(Splice(line, end - len("cuda"), line, end, b"to"))
        if not node.args and all(keyword.arg != "device" for keyword in node.keywords):
            if node.keywords:
                first = node.keywords[0]
                line, at, text = first.lineno, first.col_offset, b"accelerator_type(), "
            else:
                line, end = end_of(node)
                at, text = end - 1, b"accelerator_type()"
            self.found.append(Splice(line, at, line, at, text))
            self.needed.add("accelerator_type")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in DEVICE_KEYWORDS and is_cuda_text(node.value):
            self._put(node.value, "accelerator_type()", "accelerator_type")
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for text in filter(is_type_name, compared(node)):
            literal = self.source.segment(text).decode()
            self._put(text, f"accelerator_tensor_type({literal})", "accelerator_tensor_type")
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Edit it as text: before Python 3.12, nodes inside f-strings have wrong positions."""
        text = self.source.segment(node).decode()
        for matches, pattern, name in IN_F_STRINGS:
            count = sum(matches(inner) for inner in ast.walk(node))
            text, done = re.subn(pattern, name, text) if count else (text, 0)
            if done != count:
                raise DriftError(
                    f"an f-string at line {node.lineno} holds {pattern} {done} times as text"
                    f" and {count} times as code",
                    expected="the same number",
                    help="Add this form to the rule in patches/portable_device.py",
                )
            if count:
                self.needed.add(name)
        if text.encode() != self.source.segment(node):
            self.found.append(Splice.over(node, text))

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass


def splices(source: Source) -> Iterator[Splice]:
    """Yield all changes of one file, including the import of names from the facade."""
    rule = _Rule(source)
    rule.visit(source.tree)
    if rule.needed:
        names = ", ".join(sorted(rule.needed))
        yield source.import_splice(f"from mqo.megatron.device import {names}")
    yield from rule.found


def leftovers(source: Source) -> Iterable[Place]:
    """Yield every form above that remains in the result, except in imports."""
    for node in source.walk():
        if isinstance(node, ast.Attribute) and is_torch_cuda(node):
            yield Place(node.lineno, "torch.cuda")
        elif isinstance(node, ast.Call):
            if is_cuda_device(node) or is_to_cuda(node) or is_cuda_argument(node):
                yield Place(node.lineno, ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in DEVICE_KEYWORDS:
            if is_cuda_text(node.value):
                yield Place(node.value.lineno, ast.unparse(node))
        elif isinstance(node, ast.Compare) and any(map(is_type_name, compared(node))):
            yield Place(node.lineno, ast.unparse(node))


def is_torch_cuda(node: ast.AST) -> bool:
    """Match the expression `torch.cuda`."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
            return True
    return False


def is_cuda_text(node: ast.AST) -> bool:
    """Match the literal "cuda"; with an index ("cuda:0") it names one device and stays."""
    return isinstance(node, ast.Constant) and node.value == "cuda"


def compared(node: ast.Compare) -> Iterator[ast.expr]:
    """Yield the operands of a comparison, including elements of lists, tuples and sets."""
    for part in [node.left, *node.comparators]:
        yield from [part, *getattr(part, "elts", [])]


def is_type_name(node: ast.AST) -> bool:
    """Match a literal such as "torch.cuda.FloatTensor"."""
    value = getattr(node, "value", None)
    return (
        isinstance(node, ast.Constant)
        and isinstance(value, str)
        and bool(TYPE_NAME.fullmatch(value))
    )


def is_cuda_device(node: ast.AST) -> bool:
    """Match `torch.device("cuda")`, `torch.device(f"cuda:{i}")`, `torch.device("cuda", i)`."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="device"), args=[first, *_]
        ):
            pass
        case _:
            return False
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    return isinstance(first, ast.Constant) and str(first.value).startswith("cuda")


def is_to_cuda(node: ast.Call) -> bool:
    """Match `x.cuda(...)` on anything but a module called torch."""
    match node.func:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
            return False
        case ast.Attribute(attr="cuda"):
            return True
    return False


def is_cuda_argument(node: ast.Call) -> bool:
    """Match `x.to("cuda")` and `torch.autocast("cuda", ...)`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return name in {"to", "autocast"} and bool(node.args) and is_cuda_text(node.args[0])


# (matcher of code inside an f-string, its pattern as text, the name in the facade)
IN_F_STRINGS = (
    (is_torch_cuda, r"\btorch\.cuda\b(?!\.\w*Tensor)", "accelerator"),
    (is_cuda_device, r"\btorch\.device(?=\(\s*f?['\"]cuda)", "accelerator_device"),
)

CODEMOD = Codemod(
    roots=("megatron/core/", "megatron/training/"),
    needle=re.compile(rb"cuda"),
    splices=splices,
    leftovers=leftovers,
)
