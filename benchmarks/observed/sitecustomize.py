"""Change the products of a training, for benchmarks/exactness.py; Python imports this at its start.

MQO_PRODUCTS is a folder, in which the first product of each site and layer is stored. With "old"
operands include alpha, and torch multiplies them, as before version 0.3. With "rounded" they
include alpha, too, and linear layers multiply them in float32, as new products do on a CPU: torch's
kernels for bfloat16 take many times longer on a CPU without instructions for it.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

ROWS = 128  # of a product, of each matrix of a batch


class Changed(MetaPathFinder):
    """Imports mqo.quant.gemms, and changes it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that changes it."""
        if name != "mqo.quant.gemms":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def changed(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def change(gemms: Any) -> None:
    """Store products, or leave alphas in operands."""
    operands, chosen = gemms.QuantizedOperands, os.environ["MQO_PRODUCTS"]
    if chosen == "rounded":
        operands.product = rounded
        return
    if chosen == "old":
        operands.separate_alphas = lambda self: gemms.Alphas()
        return
    multiplying = operands.product

    def product(self: Any, function: Any) -> Any:
        multiply = multiplying(self, function)

        def stored(*args: Any, **kwargs: Any) -> Any:
            result = multiply(*args, **kwargs)
            store(Path(chosen) / f"{self.site.name} {self.layer}.pt", self, args, kwargs, result)
            return result

        return stored

    operands.product = product


def rounded(self: Any, function: Any) -> Any:
    """Replace `QuantizedOperands.product`: multiply operands that include alpha in float32."""
    import torch
    from mqo.quant.products import matmul

    return partial(matmul, alpha=1.0) if function is torch.matmul else function


def store(path: Path, operands: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Write the first rows of a product and of its left operand, its right operand, and alpha."""
    import torch

    if path.exists():
        return
    left, right = args[-2:]
    alpha = operands.alphas.both * kwargs.get("alpha", 1.0)
    if right.dim() == 2:
        left, result = left.flatten(0, -2), result.flatten(0, -2)
    kept = {"left": left[..., :ROWS, :], "right": right, "result": result[..., :ROWS, :]}
    torch.save({name: t.detach().clone() for name, t in kept.items()} | {"alpha": alpha}, path)


if os.environ.get("MQO_PRODUCTS"):
    sys.meta_path.insert(0, Changed())
