"""The tables of what a published model keeps, compared with the logits of real small models."""

import functools
import json
import sys
from pathlib import Path

import pytest
from mqo.launch.families import FAMILIES
from mqo.launch.hf_config import keys_without_effect, known_keys
from mqo.launch.published_args import table

from ... import forking

pytest.importorskip("modelopt")
pytest.importorskip("transformers")

LIMIT = 1e-4
KINDS = {
    "grouped": FAMILIES["LlamaForCausalLM"],
    "latent": FAMILIES["DeepseekV2ForCausalLM"],
}
# Arguments that one process on a CPU cannot have at another value, and why.
UNSETTABLE = {
    "a size or split over several ranks": """context_parallel_size decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers expert_model_parallel_size expert_tensor_parallel_size
        overlap_moe_expert_parallel_comm overlap_p2p_comm_warmup_flush
        pipeline_model_parallel_layout pipeline_model_parallel_size sequence_parallel
        tensor_model_parallel_size defer_embedding_wgrad_compute delay_wgrad_compute
        ep_overlap_early_attn_memory_release variable_seq_lengths moe_enable_deepep
        moe_shared_expert_overlap""",
    "a kernel of CUDA, apex or Transformer Engine": """apply_rope_fusion attention_backend
        batch_invariant_mode cache_mla_latents cuda_graph_impl cuda_graph_modules enable_cuda_graph
        external_cuda_graph fine_grained_activation_offloading gradient_accumulation_fusion
        inference_disable_triton_nvls_kernels inference_fuse_tp_communication moe_permute_fusion
        moe_router_fusion no_persist_layer_norm overlap_dispatch_backward_with_experts_wgrad
        symmetric_ar_type transformer_impl use_grouped_gemm_for_shared_expert
        use_te_activation_func""",
    "a precision of Transformer Engine": """fp4_param_gather fp8 fp8_output_proj fp8_param_gather
        moe_router_padding_for_fp8 moe_router_padding_for_quantization te_precision_config_file""",
    "needs another argument, which is refused or on this list": """moe_pad_expert_input_to_capacity
        moe_paged_stash moe_single_grouped_bias moe_single_grouped_weight recompute_granularity""",
    "rows of padding, which published_logits.py changes": "make_vocab_size_divisible_by",
    "upstream's own code fails": "config_logger_dir init_method_xavier_uniform",
    "a dtype, as bf16 and fp16 name it": "params_dtype",
}
# Arguments that no change below sets, and why.
UNCHANGED = {
    "the dtype of the tensors, which test_convert.py compares bit by bit": "bf16 fp16",
    "what the two kinds of models are": "multi_latent_attention",
    "has one value": """add_bias_linear normalization position_embedding_type squared_relu
        swiglu""",
    "sizes of Mamba layers, which test_convert.py converts": """mamba_head_dim mamba_num_groups
        mamba_num_heads mamba_state_dim""",
    "of older releases": "hybrid_attention_ratio hybrid_mlp_ratio",
    "of checkouts with megatron.post_training": "export_model_type",
    "follows from make_vocab_size_divisible_by": "padded_vocab_size",
}
UNCHANGED_KEYS = {
    "name the class": "architectures model_type",
    "has one value": """attention_bias hidden_act mlp_bias moe_layer_freq norm_topk_prob q_lora_rank
        rope_interleaved routed_scaling_factor scoring_func topk_method""",
    "older forms of rope_parameters": "rope_scaling rope_theta partial_rotary_factor",
}


def names(reasons):
    return {name for text in reasons.values() for name in text.split()}


@pytest.fixture(scope="module")
def measured(vendored, tmp_path_factory):
    """A function of a kind: the tables of published_logits.py."""
    folder = tmp_path_factory.mktemp("logits")

    @functools.cache
    def measure(kind):
        script, result = Path(__file__).with_name("published_logits.py"), folder / f"{kind}.json"
        command = [sys.executable, "-W", "ignore", script, vendored.root, kind, result]
        done = forking.run(command)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(result.read_text())

    return measure


def moved(table):
    """The changes that moved the logits, or ended in an error."""
    return {name: by for name, by in table.items() if isinstance(by, str) or by >= LIMIT}


by_kind = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.slow


def test_the_table_lists_the_arguments_of_the_vendored_release(measured):
    facts, rows = measured("grouped"), table()
    parser = set(facts["parser"])
    assert parser - rows.names == set()
    assert set(facts["validated"]) - rows.names == set()
    groups = ("trainer", "records", "older_releases", "post_training")
    elsewhere = frozenset().union(*(rows.no_effect[group] for group in groups))
    elsewhere |= names({why: text for why, text in UNCHANGED.items() if why.startswith("of ")})
    assert rows.names - elsewhere - parser == set()
    assert elsewhere & parser == set()


@by_kind
def test_arguments_without_effect_do_not_move_the_logits(measured, kind):
    facts = measured(kind)
    tried = facts["arguments"]
    assert tried.keys() == table().without_effect & set(facts["validated"])
    assert moved(tried).keys() <= names(UNSETTABLE)


def test_arguments_that_are_not_tried_are_listed(measured):
    """A name that could be tried is not on the list."""
    failed = [moved(measured(kind)["arguments"]).keys() for kind in KINDS]
    assert names(UNSETTABLE) == set().union(*failed)


def test_refused_arguments_move_the_logits(measured):
    """The control of the tests above, with the arguments that changed no shape."""
    moving = moved(measured("grouped")["refused"])
    for name in (
        "activation_func_clamp_value",
        "glu_linear_offset",
        "no_rope_freq",
        "rotary_seq_len_interpolation_factor",
        "softmax_type",
        "window_size",
    ):
        assert isinstance(moving[name], float)


@by_kind
def test_what_config_json_expresses_has_the_same_logits_in_transformers(measured, kind):
    assert moved(measured(kind)["published"]) == {}


@by_kind
def test_what_config_json_says_has_the_same_logits_in_megatron(measured, kind):
    assert moved(measured(kind)["imported"]) == {}


def test_each_expressed_argument_is_changed(measured):
    changed = set()
    for kind in KINDS:
        facts = measured(kind)
        flags = (flag for change in facts["published"] for flag in json.loads(change))
        changed |= {facts["flags"][flag] for flag in flags}
    rows = table()
    known = rows.expressed.union(*rows.values.values())
    assert known - changed == names(UNCHANGED)
    assert changed <= known | rows.without_effect


def test_each_key_that_is_read_is_changed(measured):
    for kind, family in KINDS.items():
        changed = {key for change in measured(kind)["imported"] for key in json.loads(change)}
        changed = changed - {"rope"} | {"rope_parameters"} | names(UNCHANGED_KEYS)
        changed |= {"rms_norm_eps"} if kind == "latent" else set()  # which has one value there
        assert known_keys(family) - keys_without_effect() - family.ignored_keys <= changed


@by_kind
def test_keys_without_effect_do_not_move_the_logits_of_transformers(measured, kind):
    tried = measured(kind)["keys"]
    assert tried.keys() == keys_without_effect() | KINDS[kind].ignored_keys
    assert moved(tried) == {}
