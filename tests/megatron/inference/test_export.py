"""Exports of quantized models, read by an independent reader: the same logits, the same weights."""

import json
from types import SimpleNamespace

import pytest
import torch
from megatron.inference import export, ptq
from modelopt.torch.quantization.nn import TensorQuantizer
from mqo.launch.flags import architecture_flags
from mqo.launch.hf_config import config_of
from mqo.matrix.tables import Llama3Rope, Mla, Moe, Shape
from mqo.megatron.run.errors import PtqError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .conftest import FLAGS, GROUPS, VOCABULARY
from .hf_reference import input_of, layer_of, weight_of
from .hf_reference import logits as theirs

LENGTH = 32
COMMON = {
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
}
LLAMA = Shape(
    **COMMON,
    num_layers=2,
    num_query_groups=2,
    tied_embeddings=True,
    rope=Llama3Rope(factor=32, low=1, high=4, original=8192),
)
DEEPSEEK = Shape(
    **COMMON,
    num_layers=2,
    tied_embeddings=False,
    mla=Mla(kv_lora_rank=128, qk_head_dim=16, qk_pos_emb_head_dim=16, v_head_dim=32),
    moe=Moe(
        dense_layers=1, num_experts=4, topk=2, shared_experts=2, expert_ffn_size=128, aux_loss=0.001
    ),
)
KINDS = {"llama": LLAMA, "deepseek": DEEPSEEK}
FORMATS = ("int8", "int8_sq", "int8_wo", "fp8", "fp8_pc_pt", "int4", "int4_awq", "w4a8_awq")
# Their activations stay as they are, so that nothing is at the edge between two values.
EXACT = ("int8_wo", "int4", "int4_awq")
# {Megatron's layer: those that transformers has in its place, rows joined}, within a decoder layer.
LAYERS = {
    "self_attention.linear_q_proj": ["self_attn.q_proj"],
    "self_attention.linear_kv_down_proj": ["self_attn.kv_a_proj_with_mqa"],
    "self_attention.linear_kv_up_proj": ["self_attn.kv_b_proj"],
    "self_attention.linear_proj": ["self_attn.o_proj"],
    "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.linear_fc2": ["mlp.down_proj"],
    "mlp.shared_experts.linear_fc1": [f"mlp.shared_experts.{n}_proj" for n in ("gate", "up")],
    "mlp.shared_experts.linear_fc2": ["mlp.shared_experts.down_proj"],
    "mlp.experts.local_experts.3.linear_fc1": [f"mlp.experts.3.{n}_proj" for n in ("gate", "up")],
    "mlp.experts.local_experts.3.linear_fc2": ["mlp.experts.3.down_proj"],
}


@pytest.fixture(scope="module")
def quantized_as(make, tokens):
    """A function that gives a new model of a kind, quantized."""

    def build(kind, name):
        flags = architecture_flags(KINDS[kind], LENGTH)
        # So large that logits are some units, and norms that cannot stand for one another.
        base = " ".join(FLAGS).replace(GROUPS, "").split()
        model = make(*flags, "--init-method-std", "0.1", base=base)
        drawn = torch.Generator().manual_seed(3)
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.data.normal_(1, 0.2, generator=drawn)
        return ptq.quantize(model, name, [tokens[0][0]])

    return build


def exported(model, kind, folder):
    config = config_of(KINDS[kind], "fp32", LENGTH)
    export.write_json(folder / "config.json", config)
    export.export_hf(model, folder)
    return json.loads((folder / "hf_quant_config.json").read_text())["quantization"]


def exported_dequantized(model, kind, folder, dtype="fp32"):
    """The exported model, as plain transformers loads it."""
    export.write_json(folder / "config.json", config_of(KINDS[kind], dtype, LENGTH))
    export.export_dequantized(model, folder)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    missing = set(info["missing_keys"]) - {"lm_head.weight"}  # a tied head
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"]
    return loaded.eval()


CASES = [("llama", name) for name in FORMATS] + [("deepseek", name) for name in EXACT]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_export_has_the_logits_of_the_quantized_model(
    quantized_as, tokens, tmp_path, kind, name
):
    model = quantized_as(kind, name)
    ours = ptq.logits(model, tokens[0][0])
    exported(model, kind, tmp_path)
    off = (theirs(tmp_path, tokens[0][0]) - ours).norm(dim=-1) / ours.norm(dim=-1)
    # An activation that lies at the edge between two values may fall to either side, for the sums
    # are taken in another order; the tokens behind it see that. Most tokens see none.
    assert off.median() < 1e-4
    if name in EXACT:
        assert off.max() < 1e-3


@pytest.mark.parametrize("name", FORMATS)
def test_each_exported_layer_is_the_quantized_one(quantized_as, tokens, tmp_path, name):
    """With the same input: through the latents a value at an edge would reach all tokens."""
    model, seen = quantized_as("deepseek", name), {}

    def note(path, inputs, output):
        # Later sums are taken in place.
        seen.setdefault(path, (inputs[0].clone(), output[0].clone()))

    for path, module in model.named_modules():
        if hasattr(module, "weight_quantizer"):
            module.register_forward_hook(lambda _, i, o, path=path: note(path, i, o))
    ptq.logits(model, tokens[0][0])
    algorithm = exported(model, "deepseek", tmp_path)["quant_algo"]
    stored, compared = load_file(tmp_path / "model.safetensors"), 0
    for path, (x, output) in seen.items():
        number, _, place = path.removeprefix("decoder.layers.").partition(".")
        for name_there in LAYERS.get(place, [])[:1]:
            parts = [layer_of(stored, f"model.layers.{number}.{n}") for n in LAYERS[place]]
            weight = torch.cat([weight_of(part) for part in parts])
            expected = input_of(x, parts[0], algorithm) @ weight.T
            assert (expected - output).norm() / output.norm() < 1e-3, name_there
            compared += 1
    assert compared == 2 * 4 + 2 + 4


@pytest.mark.parametrize(("kind", "name"), [*CASES, ("llama", "fp8_blockwise")])
def test_plain_transformers_runs_the_dequantized_weights(
    quantized_as, tokens, tmp_path, kind, name
):
    """Against the quantized model with activations as they are: only weights can be exported."""
    model = quantized_as(kind, name)
    loaded = exported_dequantized(model, kind, tmp_path)
    with torch.no_grad():
        found = loaded(tokens[0][0]).logits
    whole, rounds_activations = ptq.logits(model, tokens[0][0]), False
    for path, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and path.endswith("input_quantizer"):
            rounds_activations |= module.is_enabled
            module.disable()  # it still scales, as SmoothQuant and AWQ need
    ours = ptq.logits(model, tokens[0][0])
    # Sums are taken in another order, and a column's scale moves from the input to the weight.
    assert (found - ours).norm() / ours.norm() < 1e-4
    assert torch.equal(ours, whole) != rounds_activations
    assert rounds_activations == (name not in (*EXACT, "fp8_blockwise"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "hf_quant_config.json").exists()


@pytest.mark.parametrize("name", [*FORMATS, "fp8_blockwise"])
def test_dequantized_weights_are_those_of_the_quantized_model_to_the_bit(
    quantized_as, tmp_path, name
):
    model = quantized_as("llama", name)
    exported_dequantized(model, "llama", tmp_path)
    stored, compared = load_file(tmp_path / "model.safetensors"), 0
    for number, layer in enumerate(model.decoder.layers):
        prefix = f"model.layers.{number}."
        qkv = layer.self_attention.linear_qkv
        rows = export.qkv_rows(qkv.config, qkv.weight.shape[0])
        fused = torch.empty_like(qkv.weight)
        for part, own in rows.items():
            fused[own] = stored[f"{prefix}self_attn.{part}_proj.weight"]
        pairs = [(qkv, fused)]
        pairs.append((layer.self_attention.linear_proj, stored[f"{prefix}self_attn.o_proj.weight"]))
        both = [stored[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        pairs.append((layer.mlp.linear_fc1, torch.cat(both)))
        pairs.append((layer.mlp.linear_fc2, stored[f"{prefix}mlp.down_proj.weight"]))
        for module, found in pairs:
            expected = module.weight_quantizer(module.weight)
            smooth = getattr(module.input_quantizer, "pre_quant_scale", None)
            expected = expected if smooth is None else expected * smooth.flatten()
            assert torch.equal(found, expected)
            assert not torch.equal(found, module.weight)
            compared += 1
    assert compared == 8


@pytest.mark.parametrize("name", EXACT)
def test_dequantized_weights_are_what_the_packed_export_means(quantized_as, tmp_path, name):
    """By the independent reader."""
    model, (packed, plain) = quantized_as("deepseek", name), (tmp_path / "a", tmp_path / "b")
    packed.mkdir()
    plain.mkdir()
    exported(model, "deepseek", packed)
    exported_dequantized(model, "deepseek", plain)
    scaled, values = (load_file(folder / "model.safetensors") for folder in (packed, plain))
    assert {key for key in scaled if "scale" not in key} == values.keys()
    for key, value in values.items():
        parts = layer_of(scaled, key.removesuffix(".weight"))
        if "weight_scale" in parts:
            expected = weight_of(parts) * parts.get("pre_quant_scale", 1)
            # The packed integers come from a division by the scale, these values from a product
            # with its inverse: a weight half way between two may fall to either side.
            off = ~torch.isclose(value, expected, rtol=1e-5, atol=1e-7)
            assert off.float().mean() < 1e-3
        else:
            assert torch.equal(value, scaled[key])


def test_a_format_says_who_reads_it():
    assert export.READERS.keys() < ptq.FORMATS.keys()
    for name in ptq.FORMATS:
        assert "--dequantized" in export.advice(name)
        assert ("vLLM" in export.advice(name)) == (name in ("fp8", "fp8_pc_pt"))


def test_the_configuration_says_what_was_done(quantized_as, tmp_path):
    for name, algorithm, smooth in (
        ("fp8", "FP8", None),
        ("int8_wo", "W8A16", None),
        ("int4", "W4A16_AWQ", False),
        ("int4_awq", "W4A16_AWQ", True),
    ):
        (tmp_path / name).mkdir()
        found = exported(quantized_as("llama", name), "llama", tmp_path / name)
        assert found["quant_algo"] == algorithm
        assert found.get("pre_quant_scale") == smooth
        assert {"lm_head", "model.embed_tokens"} <= set(found["exclude_modules"])
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["quantization_config"]["quant_algo"] == algorithm


def test_the_fused_projection_is_cut_by_groups():
    rows = export.qkv_rows(SimpleNamespace(kv_channels=1, num_query_groups=2), 8)
    assert {name: part.tolist() for name, part in rows.items()} == {
        "q": [0, 1, 4, 5],
        "k": [2, 6],
        "v": [3, 7],
    }


@pytest.mark.parametrize("name", ["int8", "int8_sq", "fp8", "fp8_pc_pt"])
def test_tensorrt_llm_ranks_hold_their_own_heads(quantized_as, tmp_path, name):
    """The first of two ranks: the first group's queries, key and value, dequantized."""
    model = quantized_as("llama", name)
    fused = model.decoder.layers[0].self_attention.linear_qkv
    expected = fused.weight_quantizer(fused.weight)[: 4 * 32]
    rope = config_of(LLAMA, "fp32", LENGTH)["rope_scaling"]
    export.export_tensorrt_llm(model, tmp_path, 2, rope)
    stored = load_file(tmp_path / "rank0.safetensors")
    prefix = "transformer.layers.0.attention.qkv."
    scale = stored.get(f"{prefix}weights_scaling_factor", stored.get(f"{prefix}per_channel_scale"))
    weight = stored[f"{prefix}weight"].float() * scale[:, None]
    # The weights went through fp16 before they were rounded.
    assert ((weight - expected).norm() / expected.norm()).item() < 1e-2
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mapping"]["tp_size"] == 2 and (tmp_path / "rank1.safetensors").exists()
    assert config["quantization"]["exclude_modules"] == ["lm_head"]
    assert (config["num_key_value_heads"], config["share_embedding_table"]) == (2, True)
    assert config["rotary_scaling"]["factor"] == 32
    if name == "int8_sq":
        assert stored[f"{prefix}prequant_scaling_factor"].shape == (128,)
    if name.startswith("int8") or name == "fp8":
        assert stored[f"{prefix}activation_scaling_factor"].item() == pytest.approx(
            (fused.input_quantizer.amax / fused.input_quantizer.maxbound).item()
        )


@pytest.mark.parametrize(("name", "smooth"), [("int4", False), ("int4_awq", True)])
def test_tensorrt_llm_is_told_whether_inputs_are_scaled(quantized_as, tmp_path, name, smooth):
    export.export_tensorrt_llm(quantized_as("llama", name), tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization"]["pre_quant_scale"] == smooth
    stored = load_file(tmp_path / "rank0.safetensors")
    assert any(key.endswith("prequant_scaling_factor") for key in stored) == smooth
    assert stored["transformer.layers.0.mlp.proj.weights_scaling_factor"].shape == (128, 2)


def test_int4_blocks_that_ranks_would_cut_are_refused(quantized_as, tmp_path):
    with pytest.raises(PtqError, match="--inference-tensor-parallel"):
        export.export_tensorrt_llm(quantized_as("llama", "int4_awq"), tmp_path, 2)


@pytest.mark.parametrize(
    ("target", "name", "latent", "reason"),
    [
        ("hf", "fp8_blockwise", False, "fp8_blockwise .* hf: .*128 rows"),
        ("tensorrt_llm", "int8_wo", False, "int8_wo .* tensorrt_llm: .*scales"),
        ("tensorrt_llm", "fp8", True, "multi-latent.*--export-format hf"),
    ],
)
def test_what_would_be_written_wrongly_is_refused(target, name, latent, reason):
    with pytest.raises(PtqError, match=reason):
        export.check(target, name, None, latent)
    export.check("none", name, None, latent)


def test_a_decoder_that_the_model_is_not_is_refused():
    with pytest.raises(PtqError, match=r" deepseek, .*--decoder .*llama.*--decoder deepseek"):
        export.check("hf", "fp8", "llama", latent=True)
