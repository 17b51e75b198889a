"""The small changes that `mutants.py` makes: operators, constants, statements, return values."""

import ast
import copy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.LShift, ast.RShift)),
)
OTHER = dict(PAIRS) | {second: first for first, second in PAIRS}
OTHER |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
NOT_CHANGED = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """A piece of a file, the text that replaces it, and the lines that say which tests reach it."""

    file: str
    node: ast.AST
    text: str
    lines: tuple

    def __str__(self):
        place = f"{self.file}:{self.node.lineno}:{self.node.col_offset}"
        return f"{place}\t{ast.unparse(self.node)[:70]!r} -> {self.text[:70]!r}"

    def apply(self, content):
        """Return the file's content with the change."""
        lines, node = content.split(b"\n"), self.node
        before = [*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]]
        after = [lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]]
        return b"\n".join(before) + self.text.encode() + b"\n".join(after)


def replaced(node):
    """Return the node with another operator, constant or value; None if there is none."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in OTHER:
            new.ops[0] = OTHER[type(op)]()
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            new.op = OTHER[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
        case ast.Raise() | ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            new.value = ast.Constant(None)
        case _:
            return None
    return new


def mutants_of(file):
    """Yield all mutants of the functions of a file."""

    def visit(node, statement):
        function = isinstance(node, ast.FunctionDef)
        if statement and isinstance(node, ast.stmt) and not function:
            statement = node
        new = replaced(node) if statement else None
        if new is not None:
            text = ast.unparse(new) if isinstance(node, ast.stmt) else f"({ast.unparse(new)})"
            yield Mutant(file, node, text, (statement.lineno, node.lineno))
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                # The values in an f-string have no places of their own in Python 3.11.
                if not isinstance(child, ast.AST) or isinstance(node, ast.JoinedStr):
                    continue
                if name not in NOT_CHANGED and not isinstance(child, ast.arguments):
                    yield from visit(child, statement or (node if function else None))

    yield from visit(ast.parse((ROOT / file).read_bytes()), None)
