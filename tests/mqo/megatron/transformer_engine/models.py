"""Small models of local layers and of Transformer Engine's, with the same weights, that train.

`installed` is imported before.
"""

import os
from pathlib import Path

import torch
import world
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer.transformer_config import MLATransformerConfig
from mqo.megatron.attention.spec import with_local_attention
from mqo.megatron.layers import label_layers
from mqo.megatron.transformer_engine.passes import attach
from mqo.megatron.transformer_engine.releases import FACTORY
from mqo.quant import config, weights
from mqo.quant.gemms import QuantizedOperands
from mqo.quant.products import Alphas
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER

from .... import engine

LINEAR = ("fprop", "dgrad", "wgrad")
WIDE, TALL, VOCABULARY, TOKENS, BATCH = 64, 128, 96, 32, 2
DENSE = {"num_layers": 2, "ffn_hidden_size": TALL}
EXPERTS = {
    **{"num_layers": 2, "ffn_hidden_size": TALL, "moe_ffn_hidden_size": 32},
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1]},
    **{"moe_shared_expert_intermediate_size": 32, "moe_token_dispatcher_type": "alltoall"},
}
LATENT = {
    **DENSE,
    **{"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": None},
    **{"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16},
    "rope_type": "rope",
}

# The norms of local layers are the ones that the engine's compiled code stands for.
torch.nn.RMSNorm.forward = lambda norm, x: engine.Norm.apply(
    x.reshape(-1, x.shape[-1]), norm.weight, norm.eps
).view(x.shape)


def options(folder, text):
    """Have this process quantize as quant.toml says, and forget what was recorded."""
    path = Path(folder) / f"{os.getpid()}.toml"
    path.write_text(text, encoding="utf-8")
    os.environ[config.ENVIRONMENT_VARIABLE] = str(path)
    config.reset()
    weights.clear()
    RECORDER.reset()
    set_step(0)


def all_gemms(quant_type, more=""):
    """The text of quant.toml that gives every linear site a type, in the place of the source's."""
    lines = [f'{site} = "{quant_type}"' for site in LINEAR]
    return "\n".join(("[schedule]", *lines, more, "[quantizer]", "cache_weights = true", ""))


def build(engines, sizes=DENSE, **more):
    """A GPT of the engine's layers, or of local ones, named for the quantizers."""
    torch.manual_seed(7)
    chosen = {
        **{"hidden_size": WIDE, "add_bias_linear": False, "gated_linear_unit": True},
        **{"activation_func": torch.nn.functional.silu, "normalization": "RMSNorm"},
        **{"bias_activation_fusion": False, "layernorm_epsilon": 1e-5},
        **sizes,
        **more,
    }
    chosen["transformer_impl"] = "transformer_engine" if engines else "local"
    if engines:
        asked = {"fp8": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": FACTORY}
        chosen = {**chosen, **asked}
    latent = chosen.get("multi_latent_attention", False)
    made = world.config(**chosen) if not latent else latent_config(**chosen)
    spec = with_local_attention(layers(engines, made))
    model = GPTModel(made, spec, VOCABULARY, TOKENS, position_embedding_type="rope")
    label_layers(model)
    attach(model)
    return model


def latent_config(**chosen):
    """The configuration of latent attention, with `world.config`'s other choices."""
    plain = world.config(hidden_size=WIDE)
    names = ("num_attention_heads", "hidden_dropout", "attention_dropout")
    names += ("use_cpu_initialization", "gradient_accumulation_fusion", "masked_softmax_fusion")
    names += ("persist_layer_norm", "bias_dropout_fusion", "apply_rope_fusion")
    return MLATransformerConfig(**{name: getattr(plain, name) for name in names} | chosen)


def layers(engines, made):
    """Upstream's spec of the layers."""
    if made.num_moe_experts:
        return specs.get_gpt_decoder_block_spec(
            made, use_transformer_engine=engines, normalization="RMSNorm"
        )
    latent = {"multi_latent_attention": made.multi_latent_attention}
    latent["qk_layernorm"] = made.qk_layernorm
    if engines:
        return specs.get_gpt_layer_with_transformer_engine_spec(**latent)
    return specs.get_gpt_layer_local_spec(normalization="RMSNorm", **latent)


# The engine's layers hold the norms before them.
_NORMS = {
    "linear_qkv.layer_norm_weight": ("self_attention.linear_qkv", "input_layernorm"),
    "linear_fc1.layer_norm_weight": ("mlp.linear_fc1", "pre_mlp_layernorm"),
    "linear_kv_up_proj.layer_norm_weight": ("linear_kv_up_proj", "kv_layernorm"),
}


def local_name(name):
    """The name that a parameter of the engine's model has in the local one."""
    for end, (module, norm) in _NORMS.items():
        if name.endswith(end):
            return name.replace(f"{module}.layer_norm_weight", f"{norm}.weight")
    head, _, last = name.rpartition(".")
    if last.removeprefix("weight").isdecimal():  # experts in one module
        experts, _, layer = head.rpartition(".")
        return f"{experts}.local_experts.{last.removeprefix('weight')}.{layer}.weight"
    return name


def give_weights(model, local):
    """Give a model of the engine's layers the weights of a local one; each has its place."""
    theirs = dict(local.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(theirs.pop(local_name(name)).data)
    assert not theirs, f"no place for {list(theirs)}"
    return model


class Seen:
    """What the quantizers were given and returned, {(site, layer, operand): [(x, q), ...]}.

    Local layers multiply operands that include alpha meanwhile, as the engine's do: an operand that
    excludes it has a product with other bits, and the next layer other operands.
    """

    def __init__(self):
        self.operands = {}
        self.separate_alphas = QuantizedOperands.separate_alphas
        QuantizedOperands.separate_alphas = lambda self: Alphas()
        self.observe = RECORDER.observe
        RECORDER.observe = self._note

    def _note(self, site, layer, operand, spec, axis, original, rounded, **named):
        kept = (
            original.detach().clone().flatten(0, -2),
            rounded.tensor.detach().clone().flatten(0, -2),
        )
        self.operands.setdefault((site, layer, operand), []).append(kept)
        self.observe(site, layer, operand, spec, axis, original, rounded, **named)

    def close(self):
        RECORDER.observe = self.observe
        QuantizedOperands.separate_alphas = self.separate_alphas
        return self.operands


def linear_weights(model):
    """The weights that the sites' GEMMs multiply."""
    return [p for n, p in model.named_parameters() if ".linear_" in n and p.dim() == 2]


def batch(number):
    """The tokens of a micro-batch."""
    return torch.randint(
        0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(number)
    )


def train(model, steps=2, micro_batches=2):
    """Train the linear layers; the losses, and the operands of all steps."""
    optimizer = torch.optim.SGD(linear_weights(model), lr=0.05)
    seen, losses = Seen(), []
    for step in range(steps):
        set_step(step)
        for module in model.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
        optimizer.zero_grad()
        for number in range(micro_batches):
            tokens = batch(10 * step + number)
            places = torch.arange(TOKENS).expand(BATCH, TOKENS)
            loss = model(tokens, places, None, labels=tokens.roll(-1, 1)).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, seen.close()


def assert_same_operands(ours, theirs):
    """Hold the operands of the engine's layers to the local ones', to the bit.

    A weight is quantized once a step by the engine, and asked for in each micro-batch by the local
    layers. Of grouped experts the engine may pad the tokens with zeros.
    """
    assert ours.keys() == theirs.keys()
    for place, pairs in ours.items():
        others = theirs[place]
        if place[2] == "weight":
            others = others[:: len(others) // len(pairs)]
        assert len(pairs) == len(others), place
        for pair, other in zip(pairs, others, strict=True):
            for one, two in zip(pair, other, strict=True):
                assert one.shape[1:] == two.shape[1:], place
                assert torch.equal(one[: len(two)], two), place
                assert not one[len(two) :].any(), place
