"""Prints what a layer keeps for backward, in values a token: {case: values}, counted by autograd.

A case whose name ends in a type has its linear inputs packed in it. "head" is all but the layers.
Started by test_memory.py as a process of its own: upstream's groups are a process's.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

TREE = Path(sys.argv[1])
HIDDEN, HEADS, GROUPS, BATCH, SEQUENCE, FFN = 256, 4, 2, 1, 256, 512
LATENTS = {"kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
WIDE = {"kv_channels": 128, "qk_layernorm": True, "add_qkv_bias": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96}
MAMBA = {"num_heads": 16, "head_dim": 32, "num_groups": 4, "state_dim": 64}
EXPERTS |= {"moe_shared_expert_intermediate_size": 192}


def load():
    """Megatron-LM/tools/verify_forward.py, with sizes of this test."""
    spec = importlib.util.spec_from_file_location("small", TREE / "tools/verify_forward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HIDDEN, module.HEADS, module.GROUPS = HIDDEN, HEADS, GROUPS
    module.BATCH, module.SEQUENCE = BATCH, SEQUENCE
    return module


def options(text):
    """Make a TOML text the quantizers' options of this process."""
    from mqo.quant import config

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        os.environ[config.ENVIRONMENT_VARIABLE] = file.name
        config.reset()
        config.current()


def quantizer(name):
    """The options of a case, as its name tells."""
    kind = name.rpartition(", ")[2]
    from mqo.quant.formats import ATTENTION_BACKWARD, FORMATS

    packed = f'fprop = "{kind}"\n[quantizer]\nsave_activations = "packed"\n'
    pv = 'pv = "mxfp8"\n' if "PV" in name else ""
    if "backward" in name:
        pv += "".join(f'{site} = "mxfp8"\n' for site in ("qk", *ATTENTION_BACKWARD))
    return f"[schedule]\n{pv}{packed if kind in FORMATS else ''}"


def kept(small, layers, latent, backend, changes):
    """Bytes that a model's loss holds for backward, parameters apart, each storage once."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    normalization, make_spec = small.local_spec()
    common = small.common(normalization) | {"num_layers": layers, "ffn_hidden_size": FFN}
    common |= {"bias_activation_fusion": True, "bf16": True, "params_dtype": torch.bfloat16}
    common |= {"attention_softmax_in_fp32": False}
    common |= changes
    if latent:
        extra = {"q_lora_rank": None, "qk_layernorm": True, "transformer_impl": "local"}
        config = MLATransformerConfig(**LATENTS, **extra, **common)
        spec = make_spec(multi_latent_attention=True, qk_layernorm=True, **experts(changes))
    else:
        config = TransformerConfig(num_query_groups=GROUPS, **common)
        spec = make_spec(qk_layernorm=config.qk_layernorm, **experts(changes))
    model = small.build(config, spec).bfloat16()
    config.attention_backend = backend
    return held_by(model, lambda: small.mean_loss(model))


def held_by(model, loss):
    """Bytes that the result of a function holds for backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no memory is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert loss().requires_grad
    return sum(held.values())


def mamba(small):
    """A token's values of a Mamba layer whose chunks are full."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from mqo.megatron.mamba.spec import mamba_layer

    common = small.common("RMSNorm") | {"bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(**{f"mamba_{key}": n for key, n in MAMBA.items()}, **common)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(mamba_layer(config), config, layer_number=1, pg_collection=groups)
    hidden = torch.zeros(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    return held_by(layer, lambda: layer(hidden)) / BATCH / SEQUENCE / 2


def experts(changes):
    count = changes.get("num_moe_experts")
    return {"num_experts": count, "moe_grouped_gemm": False} if count else {}


def main():
    sys.path.insert(0, str(TREE))
    small = load()
    from mqo.quant.formats import QUANT_TYPES

    small.start()
    core = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    from megatron.core.activations import squared_relu

    relu = {"gated_linear_unit": False, "activation_func": squared_relu}
    relu |= {"bias_activation_fusion": False}
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    full |= {"recompute_num_layers": 1}
    cases = {
        "grouped": (False, "flash", {}),
        "grouped, PV in chunks": (False, "auto", {}),
        "grouped, PV in chunks, backward": (False, "auto", {}),
        "grouped, PV": (False, "unfused", {}),
        "grouped, PV, core_attn": (False, "unfused", core),
        "grouped, full": (False, "flash", full),
        "grouped, wide": (False, "flash", WIDE),
        "grouped, wide, PV in chunks": (False, "auto", WIDE),
        "grouped, ReLU": (False, "flash", relu),
        "latent": (True, "flash", {}),
        "latent, PV in chunks": (True, "auto", {}),
        "latent, PV": (True, "unfused", {}),
        "latent, PV, core_attn": (True, "unfused", core),
        "latent, experts": (True, "flash", EXPERTS),
    }
    cases |= {f"grouped, {kind}": cases["grouped"] for kind in QUANT_TYPES[1:]}
    others = [name for name in cases if name.startswith("latent") or name.endswith("core_attn")]
    cases |= {f"{name}, mxfp4": cases[name] for name in others}
    found = {}
    for name, (latent, backend, changes) in cases.items():
        options(quantizer(name))
        few, many = (kept(small, n, latent, backend, changes) for n in (1, 2))
        found[name] = (many - few) / BATCH / SEQUENCE / 2
        found[f"{name}, head"] = (2 * few - many) / BATCH / SEQUENCE / 2
    options(quantizer("mamba"))
    found["mamba"] = mamba(small)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
