"""One forward and backward pass of a small GPT on the CPU: what `mqo verify` asks of a tree.

Belongs to the tree that it lies in, and only reports, as JSON in the file that its argument names;
`mqo verify` judges. Uses no name that a release since 0.10 lacks.
"""

import hashlib
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, HEADS, GROUPS, VOCABULARY, BATCH, SEQUENCE = 2, 64, 4, 2, 128, 2, 64


def main(target: Path) -> None:
    """Run the model, and write to `target` what came of it or which package is not installed."""
    sys.path.insert(0, str(ROOT))
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    except ModuleNotFoundError as error:
        # A missing module of Megatron's own is a fault of the tree; any other one is the machine's.
        if error.name is None or error.name.split(".")[0] == "megatron":
            raise
        facts: dict[str, Any] = {"lacks": error.name}
    else:
        facts = run()
    target.write_text(json.dumps(facts), encoding="utf-8")


def run() -> dict[str, Any]:
    """The loss in nats, every gradient as a hash, and what the quantisers recorded.

    `fused_loss` is the same loss by fused attention, None where the types keep it from running.
    """
    import torch
    from megatron.quant import RECORDER

    check_origin()
    model, normalization = build()
    loss = mean_loss(model)
    loss.backward()
    gradients, finite = hashlib.sha256(), bool(torch.isfinite(loss))
    for name, parameter in sorted(model.named_parameters()):
        assert parameter.grad is not None, f"{name} got no gradient"
        gradients.update(parameter.grad.numpy().tobytes())
        finite = finite and bool(torch.isfinite(parameter.grad).all())
    records = [(*record.key, record.calls) for record in RECORDER.entries()]
    return {
        "loss": loss.item(),
        "fused_loss": fused_loss(model),
        "gradients": gradients.hexdigest(),
        "finite": finite,
        "normalization": normalization,
        "linear_layers": sorted(linear_layers(model)),
        "attention_layers": sorted(attention_layers()),
        "records": records,
    }


def check_origin() -> None:
    """Everything named megatron must come from this tree, not from a package installed beside."""
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if name.split(".")[0] == "megatron" and origin is not None:
            assert Path(origin).resolve().is_relative_to(ROOT), f"{name} comes from {origin}"


def build() -> tuple[Any, str]:
    """The model in float32, its layers labelled, and the name of its norm."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.quant import label_layers

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    make_spec = gpt_layer_specs.get_gpt_layer_local_spec
    parameters = inspect.signature(make_spec).parameters
    takes_norm = "normalization" in parameters or "kwargs" in parameters
    # Until 0.11 the local spec is fixed at import: with apex it is a norm that refuses RMSNorm.
    fixed = getattr(gpt_layer_specs, "LNImpl", None)
    fused = getattr(fixed, "__name__", "") == "FusedLayerNorm"
    normalization = "LayerNorm" if fused and not takes_norm else "RMSNorm"
    spec = make_spec(normalization=normalization) if takes_norm else make_spec()
    model = GPTModel(
        configuration(normalization),
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    label_layers(model)
    return model, normalization


def configuration(normalization: str) -> Any:
    """A Llama in miniature: grouped queries, SwiGLU, no biases, nothing fused, no dropout."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=2 * HIDDEN,
        normalization=normalization,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    # Upstream's own path, which a model without our patches has, too. By name, and not in the
    # constructor: 0.10 has no such option.
    config.attention_backend = "unfused"
    return config


def mean_loss(model: Any) -> Any:
    """The mean cross entropy on fixed random tokens."""
    import torch

    generator = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    # True is what a query may not see.
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask, labels=labels).mean()


def fused_loss(model: Any) -> float | None:
    """The mean cross entropy when fused attention is demanded, None where it refuses."""
    import torch
    from megatron.attention import FusedAttentionError

    for module in model.modules():
        if hasattr(module, "config"):
            module.config.attention_backend = "flash"
    try:
        with torch.no_grad():
            return mean_loss(model).item()
    except FusedAttentionError:
        return None


def linear_layers(model: Any) -> set[str]:
    """The labels that fprop, dgrad and wgrad must be recorded under, from the model's shape."""
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj")
    parts += ("mlp.linear_fc1", "mlp.linear_fc2")
    return {f"decoder.layers.{i}.{part}" for i in range(LAYERS) for part in parts} | {
        "output_layer"
    }


def attention_layers() -> set[str]:
    """The labels that qk and pv must be recorded under."""
    return {f"decoder.layers.{i}.self_attention.core_attention" for i in range(LAYERS)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
