"""What the literals of a patched module say: for code that stands before the site it asks about."""

import ast
from itertools import pairwise
from pathlib import Path


def site_types(path: str) -> dict[str, str]:
    """{site: quant type} as the source file at `path` says, for sites with a plain literal.

    A site is a `custom_quant_type = '...'` and, behind it, the binding that names the site.

    Raises:
        OSError, SyntaxError: there is no such file, or it is not Python.
    """
    found = {}
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        block = getattr(node, "body", None)
        for literal, binding in pairwise(block if isinstance(block, list) else ()):
            match literal, binding:
                case (
                    ast.Assign([ast.Name("custom_quant_type")], ast.Constant(str(quant_type))),
                    ast.Assign(value=ast.Call(args=[ast.Constant(str(site)), *_])),
                ):
                    found[site] = quant_type
    return found
