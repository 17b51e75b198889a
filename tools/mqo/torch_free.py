"""The modules of megatron.quant that need no torch, loaded by path: their package imports torch."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from mqo.project import Project


def _load(name: str) -> ModuleType:
    path = Project.here().tree / "megatron/quant" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mqo.torch_free.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


formats, source = _load("formats"), _load("source")
