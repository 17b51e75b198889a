"""Prepare Transformer Engine's layers in a run, and find arguments that bypass our quantizers."""

from argparse import Namespace
from collections.abc import Iterable

from torch.nn import Module

from mqo.megatron.run.engine_states import protect_states
from mqo.megatron.transformer_engine import releases
from mqo.megatron.transformer_engine.passes import attach
from mqo.quant.config import current


def prepare(model: Iterable[Module], args: Namespace) -> None:
    """Hook each Transformer Engine module, so that our factory knows which layer requests.

    `model` are this rank's chunks, before they load a checkpoint or run.
    """
    for chunk in model:
        attach(chunk)
        protect_states(chunk, args)


def faults(args: Namespace) -> tuple[str, ...]:
    """Return one text per argument of `args` that leaves operands unquantized or loses them.

    They do not matter if no linear layer is quantized.
    """
    version = releases.installed()
    why = releases.fault(version)
    if version is None or why:
        return (f"{why}; pass --transformer-impl local",)
    texts = list(_recipe(args))
    if current().save_activations == "packed":
        texts.append(
            "--save-activations packed: Transformer Engine saves quantized tensors; leave it out"
        )
    if current().is_random and not current().cache_weights:
        texts.append(
            "Transformer Engine quantizes a weight once per step, with the random numbers of the "
            "first micro-batch; pass --cache-weights, which makes local layers do the same"
        )
    if not releases.multiplies_plain_tensors(version):
        texts += _older(args, version)
    return tuple(texts)


def _recipe(args: Namespace) -> list[str]:
    required = {"fp8_recipe": "custom", "fp8_quantizer_factory": releases.FACTORY}
    texts = []
    if not getattr(args, "fp8", None) or any(
        getattr(args, n, None) != v for n, v in required.items()
    ):
        texts.append(
            "Transformer Engine's layers do not request our quantizers; pass "
            + " ".join(releases.FLAGS)
        )
    for name, flag in (
        ("fp8_param_gather", "--fp8-param-gather: weights would be stored in its own fp8"),
        (
            "first_last_layers_bf16",
            "--first-last-layers-bf16: `[[rules]]` of a recipe select unquantized layers",
        ),
    ):
        if getattr(args, name, False):
            texts.append(f"{flag}; leave it out")
    return texts


def _older(args: Namespace, version: str | None) -> list[str]:
    """Return the faults of releases in which only the quantizer computes the GEMM."""
    needs = f"Transformer Engine {version} uses the quantizer's own GEMM"
    grouped = getattr(args, "num_experts", None) and getattr(args, "moe_grouped_gemm", False)
    texts = []
    if getattr(args, "gradient_accumulation_fusion", False):
        texts.append(
            f"{needs}, and weight gradients would be lost; pass --no-gradient-accumulation-fusion"
        )
    if getattr(args, "add_bias_linear", False):
        texts.append(f"{needs}, which does not support a bias; pass --disable-bias-linear")
    if grouped:
        texts.append(f"{needs}, which does not support groups; leave out --moe-grouped-gemm")
    return texts
