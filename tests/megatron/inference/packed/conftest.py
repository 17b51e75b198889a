"""Small models with random weights, as transformers writes them."""

import pytest
import torch

from ....small_llama import small_llama


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def folder(request, tmp_path_factory):
    """A folder of a model in bfloat16; deepseek's has latent attention and experts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    if request.param == "llama":
        model = small_llama().bfloat16()
    else:
        common = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256}
        common |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        latent = {"kv_lora_rank": 160, "q_lora_rank": None, "qk_rope_head_dim": 16}
        latent |= {"qk_nope_head_dim": 32, "v_head_dim": 32}
        experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
        experts |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1}
        config = transformers.DeepseekV2Config(**common, **latent, **experts, topk_group=1)
        model = transformers.DeepseekV2ForCausalLM(config).bfloat16()
    for weight in model.parameters():
        weight.data *= 1 + 3 * torch.rand_like(weight)
        # Rows of all magnitudes: a reader that has the blocks' borders wrong has other values.
        weight.data *= 2.0 ** torch.randint(-3, 3, (len(weight), *[1] * (weight.dim() - 1)))
    root = tmp_path_factory.mktemp("models") / request.param
    # In several files, as large models come.
    model.save_pretrained(root, max_shard_size="300KB")
    return root
