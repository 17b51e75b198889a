"""Packed weights, as the programs that they are for read them."""

import shutil

import pytest
import torch
from megatron.inference.errors import PtqError
from megatron.inference.packed import LAYOUTS, pack_folder, spec_of
from megatron.quant import fake_quantize
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TOKENS = torch.arange(1, 13).reshape(2, 6)


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def folder(request, tmp_path_factory):
    """A folder of a model with random weights, in bfloat16."""
    torch.manual_seed(3)
    common = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "intermediate_size": 256, "dtype": "bfloat16"}
    if request.param == "llama":
        config = transformers.LlamaConfig(**common, num_key_value_heads=2)
    else:
        latent = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 16}
        latent |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
        experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
        experts |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1}
        config = transformers.DeepseekV2Config(**common, **latent, **experts, topk_group=1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight in model.parameters():
        weight.data *= 1 + 3 * torch.rand_like(weight)
    root = tmp_path_factory.mktemp("models") / request.param
    model.save_pretrained(root)
    return root


def weights(folder):
    """{name: tensor} of the files."""
    return load_file(folder / "model.safetensors")


def rounded(tensors, quant_type):
    """The projections as training would round them: q, k, v have one amax, and so have gate, up."""
    made, spec = dict(tensors), spec_of(quant_type)
    for name in (name for name in tensors if name.endswith("_proj.weight") or "_mqa." in name):
        parent, own = name.split(".")[:-2], name.split(".")[-2]
        group = next((one for one in FUSED if own in one), (own,))
        fused = [tensors.get(".".join([*parent, one, "weight"])) for one in group]
        amax = max(part.abs().max() for part in fused if part is not None).float()
        made[name] = fake_quantize(tensors[name], spec, axis=-1, amax=amax)
    return made


@pytest.mark.parametrize("quant_type", LAYOUTS)
def test_transformers_computes_with_our_values(folder, tmp_path, quant_type):
    if folder.name == "deepseek" and not LAYOUTS[quant_type].reads_experts:
        with pytest.raises(PtqError, match="a model without experts, or mxfp4 or fp8_block"):
            pack_folder(folder, tmp_path, quant_type)
        assert list(tmp_path.iterdir()) == []
        return
    plain, small = tmp_path / "plain", tmp_path / "packed"
    for place in (plain, small):
        place.mkdir()
    pack_folder(folder, small, quant_type)
    save_file(rounded(weights(folder), quant_type), plain / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", plain)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected, actual, before = (
            load(place, dtype=torch.bfloat16)(TOKENS).logits for place in (plain, small, folder)
        )
    assert actual.equal(expected)
    assert not actual.equal(before)


@pytest.mark.parametrize("quant_type", LAYOUTS)
def test_a_projection_takes_as_many_bits_as_its_format(folder, tmp_path, quant_type):
    if folder.name == "deepseek" and not LAYOUTS[quant_type].reads_experts:
        pytest.skip("refused, as the test above says")
    pack_folder(folder, tmp_path, quant_type)
    name = "model.layers.0.mlp.down_proj."
    parts = {k: t for k, t in weights(tmp_path).items() if k.startswith(name)}
    elements = weights(folder)[f"{name}weight"].numel()
    scales = sum(t.nbytes for k, t in parts.items() if "weight_scale" in k)
    assert sum(t.nbytes for k, t in parts.items() if "scale" not in k) * 8 == elements * (
        4 if "fp4" in quant_type else 8
    )
    assert scales <= elements // 16
