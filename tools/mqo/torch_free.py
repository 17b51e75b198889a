"""Modules of the tree that need the standard library alone, without the packages they lie in.

Those import torch, which `mqo` does not.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from mqo.project import Project

_NAME = "mqo_megatron"  # stands for megatron
_READER = "run"  # the package of the reader of files, which other packages import


def load(name: str) -> ModuleType:
    """Return a module below Megatron-LM/megatron, such as 'quant.options'.

    The modules that it imports from its own package are loaded in the same way.
    """
    package = name.rpartition(".")[0]
    for part in ("", package, _READER):
        whole = ".".join(filter(None, (_NAME, part)))
        if whole not in sys.modules:
            made = ModuleType(whole)
            made.__path__ = [str(Project.here().ours / "megatron" / part)]
            sys.modules[whole] = made
    return importlib.import_module(f"{_NAME}.{name}")


formats, source = load("quant.formats"), load("quant.source")
