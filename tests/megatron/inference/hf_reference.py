"""Reads a quantized Hugging Face folder on its own: transformers, and what the scales mean."""

import json
from functools import partial

import torch
from torch.nn.functional import linear, silu

FP8, FP8_MAX = torch.float8_e4m3fn, 448


def unpacked(packed):
    """INT4 [out, in] of bytes [out / 2, in]: the lower half is the even row."""
    halves = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)
    return torch.where(halves > 7, halves - 16, halves).reshape(-1, packed.shape[1])


def fp8(x, scale):
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale


def weight_of(parts):
    """fp32 [out, in] of what is stored of one layer."""
    weight, scale = parts["weight"], parts["weight_scale"]
    if weight.dtype == torch.uint8:
        weight = unpacked(weight)
        scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    elif scale.dim() == 1:
        scale = scale[:, None]
    value = weight.float() * scale
    return fp8(value, parts["weight_scale_2"]) if "weight_scale_2" in parts else value


def input_of(x, parts, algorithm):
    """The activation as the layer multiplies it."""
    x = x * parts.get("pre_quant_scale", 1)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return fp8(x, x.abs().amax(-1, keepdim=True) / FP8_MAX)
    if "input_scale" not in parts:
        return x
    scale = parts["input_scale"]
    if algorithm.startswith("W8A8"):
        return (x / scale).round().clamp(-128, 127) * scale
    return fp8(x, scale)


def logits(folder, tokens):
    """[batch, length, vocabulary] of the model in `folder`, in fp32."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = load_file(folder / "model.safetensors")
    algorithm = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(dict(whole_weights(model, stored)), strict=True)
    for name, layer in model.named_modules():
        if name.endswith(".experts"):
            layer.forward = partial(run_experts, stored, name, algorithm["quant_algo"])
        parts = layer_of(stored, name)
        if "weight_scale" in parts:
            layer.register_forward_pre_hook(
                lambda _, given, parts=parts: (
                    input_of(given[0], parts, algorithm["quant_algo"]),
                    *given[1:],
                )
            )
    with torch.no_grad():
        return model(tokens).logits


def layer_of(stored, name):
    return {k.rsplit(".", 1)[1]: v for k, v in stored.items() if k.rsplit(".", 1)[0] == name}


def whole_weights(model, stored):
    """(name, tensor) of the model's state, dequantized; experts stacked as it has them."""
    for name, parameter in model.state_dict().items():
        if ".experts." in name:
            yield name, experts(name, stored, len(parameter))
        elif name == "lm_head.weight" and name not in stored:
            yield name, stored["model.embed_tokens.weight"]
        else:
            parts = layer_of(stored, name.rsplit(".", 1)[0])
            yield name, weight_of(parts) if "weight_scale" in parts else stored[name]


def experts(name, stored, count):
    prefix, kind = name.rsplit(".", 1)
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return torch.stack(
        [
            torch.cat([weight_of(layer_of(stored, f"{prefix}.{i}.{part}")) for part in names])
            for i in range(count)
        ]
    )


def run_experts(stored, name, algorithm, x, chosen, shares):
    """[tokens, width]: each expert's activations are quantized, too."""
    out = torch.zeros_like(x)
    for token, (experts_of, share_of) in enumerate(zip(chosen, shares, strict=True)):
        for expert, share in zip(experts_of.tolist(), share_of, strict=True):
            gate, up, down = (
                layer_of(stored, f"{name}.{expert}.{part}_proj") for part in ("gate", "up", "down")
            )
            one = input_of(x[token : token + 1], gate, algorithm)
            inner = silu(linear(one, weight_of(gate))) * linear(one, weight_of(up))
            inner = input_of(inner, down, algorithm)
            out[token] += share * linear(inner, weight_of(down))[0]
    return out
