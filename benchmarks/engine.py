"""Compare our emulation in Transformer Engine's linear layer with the engine's own kernels.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/engine.py [--tokens 8192] [--hidden 4096]

Runs a bfloat16 linear layer forward and backward, with a recipe of this project through our
quantizer factory, and with the engine's own recipe of the same definition. Prints the relative
differences (norms) of output and gradients, and the minimum times relative to bf16. Without
stochastic rounding, only accumulation should differ. Needs a GPU with Transformer Engine; --stub
runs only the engine's Python code, on a CPU, without its kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mqo.launch.config import resolve
from mqo.project import Project
from mqo.recipes import recipe as recipes
from timing import best, options

# Our recipes, and the engine's recipes of the same definition.
NATIVE = {
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "fp8-blockwise": "Float8BlockScaling",
    "fp8-tensorwise": "Float8CurrentScaling",
}
Tensors = tuple[torch.Tensor, ...]


def main() -> None:
    """Measure, and print one row per recipe."""
    parser = options(__doc__, tokens=8192, hidden=4096, repeats=10)
    parser.add_argument("--stub", metavar="RELEASE", help="a release in .cache/transformer_engine")
    given = parser.parse_args()
    if given.stub:
        stub(given.stub)
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
    except ImportError as error:
        print(f"Not run: Transformer Engine does not import here ({error}).")
        return
    print(f"Transformer Engine {transformer_engine.__version__}\n")
    print("| recipe | output | input gradient | weight gradient | ours / bf16 | TE / bf16 |")
    print("|---|---|---|---|---|---|", flush=True)
    plain = layer(te, given)
    (baseline,) = best({"bf16": lambda: plain(None)}, given.repeats).values()
    for name in NATIVE:
        print(row(te, given, name, baseline), flush=True)


def stub(release: str) -> None:
    """Import only the engine's Python code, as tests do."""
    root = Project.here().root
    os.environ["MQO_TEST_ENGINE"] = release
    sys.path.insert(0, str(root))
    import tests.mqo.megatron.transformer_engine.installed  # noqa: F401


def row(te: Any, given: argparse.Namespace, name: str, baseline: float) -> str:
    """Return a row of the table; it names what the device, or the stub, cannot run."""
    from mqo.megatron.transformer_engine.factory import quantizer
    from transformer_engine.common import recipe as engines

    choose(name)
    run, custom = layer(te, given), engines.CustomRecipe(qfactory=quantizer)
    ours, took = run(custom), ratio(lambda: run(custom), given, baseline)
    try:
        native = getattr(engines, NATIVE[name])()
        theirs = run(native)
        own = f"{ratio(lambda: run(native), given, baseline):.2f}x"
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        return f"| {name} | | | | {took:.2f}x | not here: {str(error).splitlines()[0][:60]} |"
    differences = [f"{difference(a, b):.1e}" for a, b in zip(ours, theirs, strict=True)]
    return f"| {name} | {' | '.join(differences)} | {took:.2f}x | {own} |"


def ratio(run: Callable[[], object], given: argparse.Namespace, baseline: float) -> float:
    """Return the time of a run divided by the bf16 time."""
    return best({"": run}, given.repeats)[""] / baseline


def choose(name: str) -> None:
    """Make this process quantize by a recipe, whatever types the source sets."""
    from mqo.quant import config, weights

    recipe = recipes.read(name)
    types = recipe.types.model_dump()
    schedule = tuple(f"{site}: {kind}" for site, kind in types.items() if kind != "none")
    cell = resolve("llama32-1b", "wikipedia", "bf16", "tiny", recipe=recipe, schedule=schedule)
    path = Path(tempfile.mkdtemp()) / "quant.toml"
    path.write_text(cell.quant_toml(cell.quantization.types or {}), encoding="utf-8")
    os.environ[config.ENVIRONMENT_VARIABLE] = str(path)
    config.reset()
    weights.clear()


def layer(te: Any, given: argparse.Namespace) -> Callable[[Any], Tensors]:
    """Return a function that runs a layer with an engine recipe, always on the same numbers."""
    from mqo.megatron.layers import label_layers
    from mqo.megatron.transformer_engine.passes import attach

    where = {"device": "cpu" if given.stub else "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(1)
    size, params = (given.hidden, given.hidden), {"params_dtype": torch.bfloat16}
    linear = te.Linear(*size, bias=False, device=where["device"], **params)
    model = torch.nn.ModuleDict({"layer": linear})
    label_layers(model)
    attach(model)
    x = torch.randn(given.tokens, given.hidden, **where).requires_grad_()
    grad = torch.randn(given.tokens, given.hidden, **where)

    def run(recipe: Any) -> Tensors:
        x.grad = linear.weight.grad = None
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = linear(x)
        y.backward(grad)
        return y.detach(), x.grad, linear.weight.grad

    return run


def difference(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, divided by the norm of `expected`."""
    return ((x.float() - expected.float()).norm() / expected.float().norm()).item()


if __name__ == "__main__":
    main()
