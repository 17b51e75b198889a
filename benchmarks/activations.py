"""Counts what a small GPT's graph keeps for backward, with full and with packed activations.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/activations.py

Bytes of all tensors that autograd saves in one forward pass, each piece of memory once, parameters
apart: a count, not a timing, so it does not depend on the machine. The tree's patches must be
applied (`mqo apply`).
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.quant import config

ROOT = Path(__file__).resolve().parents[1]
# By its path: the folder holds a coverage.py, which numba would take for the package.
PROGRAM = importlib.util.spec_from_file_location(
    "verify_forward", ROOT / "Megatron-LM/tools/verify_forward.py"
)
verify_forward = importlib.util.module_from_spec(PROGRAM)
PROGRAM.loader.exec_module(verify_forward)
verify_forward.LAYERS, verify_forward.HIDDEN, verify_forward.HEADS = 4, 512, 8
verify_forward.BATCH, verify_forward.SEQUENCE, verify_forward.VOCABULARY = 2, 512, 4096
MB = 1 << 20


def main() -> None:
    """Build the model once, and count for each type and form."""
    verify_forward.start()
    normalization, make_spec = verify_forward.local_spec()
    model = verify_forward.build(verify_forward.llama_configuration(normalization), make_spec())
    model.bfloat16()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.attention_backend = "flash"
    print(f"{verify_forward.LAYERS} layers, hidden {verify_forward.HIDDEN}, bf16, fused attention,")
    print(f"{verify_forward.BATCH} sequences of {verify_forward.SEQUENCE} tokens\n")
    print("| fprop | saved | MB | of bf16 | linear inputs MB |\n|---|---|---|---|---|")
    unit = saved_bytes(model)
    linear = linear_input_bytes(model)
    print(f"| none | full | {unit / MB:.1f} | 1.00x | {linear / MB:.1f} |")
    for kind in ("mxfp8", "mxfp4", "hifp8"):
        for form in ("full", "packed"):
            use(f'[schedule]\nfprop = "{kind}"\n[quantizer]\nsave_activations = "{form}"\n')
            saved = saved_bytes(model)
            left = (linear + saved - unit) / MB
            print(f"| {kind} | {form} | {saved / MB:.1f} | {saved / unit:.2f}x | {left:.1f} |")


def use(options: str) -> None:
    """Make a TOML text the options of this process."""
    path = Path(tempfile.gettempdir()) / f"mqo-activations-{os.getpid()}.toml"
    path.write_text(options, encoding="utf-8")
    os.environ[config.ENVIRONMENT_VARIABLE] = str(path)
    config.reset()
    config.current()
    path.unlink()


def saved_bytes(model: Any) -> int:
    """Count the bytes that the graph of one loss holds, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = verify_forward.mean_loss(model)
    assert loss.requires_grad
    return sum(held.values())


def linear_input_bytes(model: Any) -> int:
    """Count the bytes of the inputs of all linear layers, each once."""
    inputs: dict[int, int] = {}

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        storage = given[0].untyped_storage()
        inputs[storage.data_ptr()] = storage.nbytes()

    linear = [m for m in model.modules() if type(m).__name__.endswith("ParallelLinear")]
    hooks = [module.register_forward_pre_hook(note) for module in linear]
    loss = verify_forward.mean_loss(model)  # keeps the graph, so that no memory is used twice
    for hook in hooks:
        hook.remove()
    assert loss.requires_grad
    return sum(inputs.values())


if __name__ == "__main__":
    main()
