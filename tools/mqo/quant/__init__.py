"""Number formats, and GEMM operands rounded to them; needs torch, and nothing of Megatron.

The names in `__init__.pyi` are public. Each is imported on first use, so that commands can read the
formats without torch.
"""

import ast
import importlib
from pathlib import Path


def _modules() -> dict[str, str]:
    """Return {public name: its module}, as the stub for type checkers imports them."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


_MODULES = _modules()
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
