"""Run a forward and backward pass of two small GPTs on the CPU, for `mqo verify`.

One is a small Llama, the other has multi-latent attention.

It tests the tree that contains it, and reports; `mqo verify` judges the report. It uses only names
that all releases since 0.10 have.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, HEADS, GROUPS, VOCABULARY, BATCH, SEQUENCE = 2, 64, 4, 2, 128, 2, 64
LATENT = "latent"


def run() -> dict[str, Any]:
    """Return the summed loss in nats, a hash of all gradients, and the quantizers' records.

    `fused_loss` is the same loss with fused attention, or None if the types rule that out. If a
    package is missing, return only its name.
    """
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    except ModuleNotFoundError as error:
        # A missing module of Megatron is an error of the tree; any other is not installed here.
        if error.name is None or error.name.split(".")[0] in ("megatron", "mqo"):
            raise
        return {"lacks": error.name}
    import torch
    from mqo.quant.record import RECORDER

    check_origin()
    start()
    normalization, make_spec = local_spec()
    llama = build(llama_configuration(normalization), make_spec())
    latent = build(
        latent_configuration(normalization),
        make_spec(multi_latent_attention=True, qk_layernorm=True),
        prefix=LATENT,
    )
    loss = mean_loss(llama) + mean_loss(latent)
    loss.backward()
    gradients, finite = hashlib.sha256(), bool(torch.isfinite(loss))
    for name, parameter in sorted([*llama.named_parameters(), *latent.named_parameters(LATENT)]):
        assert parameter.grad is not None, f"{name} got no gradient"
        gradients.update(parameter.grad.numpy().tobytes())
        finite = finite and bool(torch.isfinite(parameter.grad).all())
    records = [(*record.key, record.calls) for record in RECORDER.entries()]
    return {
        "loss": loss.item(),
        "fused_loss": fused_loss(llama, latent),
        "gradients": gradients.hexdigest(),
        "finite": finite,
        "linear_layers": sorted(linear_layers()),
        "attention_layers": sorted(attention_layers()),
        "records": records,
    }


def check_origin() -> None:
    """Check that Megatron and mqo come from this tree, not from an installed package."""
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if name.split(".")[0] in ("megatron", "mqo") and origin is not None:
            assert Path(origin).resolve().is_relative_to(ROOT), f"{name} comes from {origin}"


def start() -> None:
    """Initialize the process group of one process, and the seeds."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from mqo.megatron.run.ranks import with_group

    with_group()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def local_spec() -> tuple[str, Callable[..., Any]]:
    """Return the name of the norm, and the function that makes a local layer spec with it."""
    from megatron.core.models.gpt import gpt_layer_specs

    make_spec = gpt_layer_specs.get_gpt_layer_local_spec
    parameters = inspect.signature(make_spec).parameters
    takes_norm = "normalization" in parameters or "kwargs" in parameters
    # Until 0.11 the norm is fixed at import; apex's does not support RMSNorm.
    fixed = getattr(gpt_layer_specs, "LNImpl", None)
    fused = getattr(fixed, "__name__", "") == "FusedLayerNorm"
    normalization = "LayerNorm" if fused and not takes_norm else "RMSNorm"
    chosen = {"normalization": normalization} if takes_norm else {}
    return normalization, partial(make_spec, **chosen)


def build(configuration: Any, spec: Any, prefix: str = "") -> Any:
    """Build the model in float32, its layers labeled."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from mqo.megatron.layers import label_layers

    # The path of an unpatched model, set as an attribute: 0.10 has no such constructor option.
    configuration.attention_backend = "unfused"
    model = GPTModel(
        configuration,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    label_layers(model, prefix)
    return model


def llama_configuration(normalization: str) -> Any:
    """Return the configuration of a small Llama with grouped queries."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_query_groups=GROUPS, **common(normalization))


def latent_configuration(normalization: str) -> Any:
    """Return a configuration of multi-latent attention: keys of 16 + 8, values of 16."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    # Not in every release: 0.10 makes all positions up to the last one; since 0.19 the norms read
    # the implementation.
    some = {"max_position_embeddings": SEQUENCE, "transformer_impl": "local"}
    return MLATransformerConfig(
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        qk_layernorm=True,
        **{name: value for name, value in some.items() if hasattr(MLATransformerConfig, name)},
        **common(normalization),
    )


def common(normalization: str) -> dict[str, Any]:
    """Return the common configuration: SwiGLU, no biases, no fusions, no dropout."""
    import torch

    return {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 2 * HIDDEN,
        "normalization": normalization,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }


def mean_loss(model: Any) -> Any:
    """Compute the mean cross entropy on fixed random tokens."""
    import torch

    generator = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    # True is masked.
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask, labels=labels).mean()


def fused_loss(*models: Any) -> float | None:
    """Compute the summed loss with fused attention; None if that is refused."""
    import torch
    from mqo.megatron.attention.choice import FusedAttentionError

    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "config"):
            module.config.attention_backend = "flash"
    try:
        with torch.no_grad():
            return sum(mean_loss(model) for model in models).item()
    except FusedAttentionError:
        return None


def linear_layers() -> set[str]:
    """Return the labels under which the linear sites must be recorded, from the models' shapes."""
    mlp = ("mlp.linear_fc1", "mlp.linear_fc2")
    llama = (*mlp, *(f"self_attention.linear_{name}" for name in ("qkv", "proj")))
    names = ("q_proj", "kv_down_proj", "kv_up_proj", "proj")
    latent = (*mlp, *(f"self_attention.linear_{name}" for name in names))
    labels = {f"decoder.layers.{i}.{part}" for i in range(LAYERS) for part in llama}
    labels |= {f"{LATENT}.decoder.layers.{i}.{part}" for i in range(LAYERS) for part in latent}
    return labels | {"output_layer", f"{LATENT}.output_layer"}


def attention_layers() -> set[str]:
    """Return the labels under which qk and pv must be recorded."""
    names = [f"decoder.layers.{i}.self_attention.core_attention" for i in range(LAYERS)]
    return {*names, *(f"{LATENT}.{name}" for name in names)}
