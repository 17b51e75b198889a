"""The tables: what they hold agrees with what is published, and with itself."""

import pytest
from mqo.errors import UnknownNameError
from mqo.matrix import tables
from mqo.overlay.quant_types import gemms
from mqo.quant import formats
from pydantic import ValidationError


def parameters(model: tables.Model) -> int:
    """Count the weights of a model with RMSNorm, by its shapes."""
    if model.mamba:
        return hybrid(model)
    hidden, dense = model.hidden_size, model.moe.dense_layers if model.moe else model.num_layers
    mlp = 3 * hidden * model.ffn_hidden_size
    mlps = dense * mlp + (model.num_layers - dense) * (experts(model) if model.moe else 0)
    embeddings = model.vocab_size * hidden * (1 if model.tied_embeddings else 2)
    attention = latent(model) if model.mla else grouped(model)
    return model.num_layers * (attention + 2 * hidden) + mlps + embeddings + hidden


def hybrid(model: tables.Model) -> int:
    """Count the weights of a model with Mamba layers and squared ReLU, which has no gate."""
    hidden, mamba = model.hidden_size, model.mamba
    inner, states = mamba.num_heads * mamba.head_dim, 2 * mamba.num_groups * mamba.state_dim
    projections = hidden * (2 * inner + states + mamba.num_heads) + inner * hidden
    layers = {
        "M": projections + 5 * (inner + states) + 3 * mamba.num_heads + inner,
        "-": 2 * hidden * model.ffn_hidden_size,
        "*": grouped(model),
    }
    return sum(layers[kind] + hidden for kind in model.pattern) + hidden * (
        2 * model.vocab_size + 1
    )


def grouped(model: tables.Model) -> int:
    heads, groups = model.num_attention_heads, model.num_query_groups
    head = model.hidden_size // heads
    return model.hidden_size * head * (heads + 2 * groups) + heads * head * model.hidden_size


def latent(model: tables.Model) -> int:
    mla, heads, hidden = model.mla, model.num_attention_heads, model.hidden_size
    query = hidden * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    down = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim) + mla.kv_lora_rank  # and its norm
    up = mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return query + down + up + heads * mla.v_head_dim * hidden


def experts(model: tables.Model) -> int:
    moe, hidden = model.moe, model.hidden_size
    routed = moe.num_experts * (3 * hidden * moe.expert_ffn_size + hidden)  # and the router's row
    return routed + 3 * hidden * moe.shared_ffn_size


@pytest.mark.parametrize("name", tables.models())
def test_shapes_add_up_to_the_published_total(name):
    model = tables.models()[name]
    assert parameters(model) == model.parameters


@pytest.mark.parametrize("name", tables.models())
def test_an_unshrunk_model_is_the_published_one(name):
    assert tables.models()[name].shrunk(1, 1) == tables.models()[name]


@pytest.mark.parametrize("name", tables.models())
def test_a_shrunk_model_keeps_its_kind(name):
    full, small = tables.models()[name], tables.models()[name].shrunk(8, 4)
    assert small.num_layers == full.num_layers // 4
    assert small.hidden_size * 8 == full.hidden_size
    assert small.ffn_hidden_size % 32 == 0
    assert 0.95 < small.ffn_hidden_size * 8 / full.ffn_hidden_size <= 1
    assert small.hidden_size % small.num_attention_heads == 0
    assert (small.rope, small.tied_embeddings) == (full.rope, full.tied_embeddings)


@pytest.mark.parametrize("name", ["llama32-1b", "llama31-8b"])
def test_shrunk_grouped_queries_keep_their_ratio(name):
    full, small = tables.models()[name], tables.models()[name].shrunk(8, 4)
    ratio = full.num_attention_heads // full.num_query_groups
    assert small.num_attention_heads == ratio * small.num_query_groups
    assert small.num_query_groups > 1, "grouped-query attention must not become multi-query"
    assert small.hidden_size // small.num_attention_heads % 32 == 0, "heads hold whole MX blocks"


def test_shrunk_latent_attention_keeps_its_proportions_and_experts_are_still_chosen():
    full = tables.models()["deepseek2_lite"]
    small = full.shrunk(8, 4)
    sizes, smaller = full.mla.model_dump(), small.mla.model_dump()
    assert smaller.pop("kv_lora_rank") * 8 == sizes.pop("kv_lora_rank")
    assert {name: size * 2 for name, size in smaller.items()} == sizes
    assert all(size % 32 == 0 for size in smaller.values()), "heads hold whole MX blocks"
    assert small.num_attention_heads * 4 == full.num_attention_heads
    assert small.num_attention_heads * small.mla.v_head_dim == small.hidden_size
    assert 1 < small.moe.topk < small.moe.num_experts < full.moe.num_experts
    assert 0 < small.moe.dense_layers < small.num_layers
    assert small.moe.shared_experts == full.moe.shared_experts
    assert 0.9 < small.moe.expert_ffn_size * 8 / full.moe.expert_ffn_size <= 1
    assert small.moe.expert_ffn_size % 32 == 0
    assert small.moe.aux_loss == full.moe.aux_loss


def test_a_model_has_one_kind_of_attention_and_the_positions_that_go_with_it():
    row = tables.models()["deepseek2_lite"].model_dump(exclude_none=True)
    assert tables.Model(**row) == tables.models()["deepseek2_lite"]
    llama = tables.models()["llama32-1b"].rope.model_dump()
    for change in ({"num_query_groups": 16}, {"mla": None}, {"rope": llama}, {"heads": 16}):
        with pytest.raises(ValidationError):
            tables.Model(**row | change)


def test_only_a_model_with_mamba_layers_may_have_no_positions():
    nemotron = tables.models()["nemotron-h-8b"]
    assert nemotron.rotary_base is None
    row = tables.models()["llama31-8b"].model_dump(exclude_none=True)
    for without in ({"rotary_base"}, {"rotary_base", "rope"}):
        with pytest.raises(ValidationError, match="rotary_base"):
            tables.Model(**{key: row[key] for key in row.keys() - without})
    with pytest.raises(ValidationError, match="rotary_base"):
        tables.Model(**nemotron.model_dump(exclude_none=True) | {"rope": row["rope"]})


def test_a_shrunk_hybrid_has_layers_of_all_kinds():
    small = tables.models()["nemotron-h-8b"].shrunk(8, 4)
    assert {*small.pattern} == {*"M-*"}
    assert small.mamba.num_heads * 8 == 128
    assert small.activation == "squared_relu"


def test_three_models_have_scripts():
    assert {*tables.script_models()} == {"llama32-1b", "llama31-8b", "deepseek2_lite"}


def test_ten_modes_have_scripts():
    names = [name for name, mode in tables.modes().items() if mode.scripts]
    expected = ["bf16"]
    for prefix in ("FA_", "linear_", "FA_linear_"):
        expected += [f"{prefix}{quant_type}" for quant_type in ("mxfp8", "mxfp4", "hifp8")]
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize("quant_type", tables.quant_types())
def test_every_type_has_every_family_of_modes(quant_type):
    names = ("", "FA_", "linear_", "FA_linear_", "qk_", "pv_", "qk_pv_")
    assert {f"{name}{quant_type}" for name in names} <= tables.modes().keys()


def test_modes_of_all_types_are_shown_as_a_pattern():
    everything = list(tables.modes())
    short = ["bf16", "FA_T", "linear_T", "FA_linear_T", "T", "qk_T", "pv_T", "qk_pv_T"]
    assert tables.patterns(everything) == short
    assert tables.patterns(everything[:4]) == everything[:4]
    types = [tables.NONE, *tables.quant_types()]
    assert tables.patterns(types) == types


@pytest.mark.parametrize(
    ("mode", "gemms", "expected"),
    [
        ("bf16", "fprop", "none none none none none"),
        ("bf16", "all", "none none none none none"),
        ("FA_mxfp4", "fprop", "none none none mxfp4 none"),
        ("FA_mxfp4", "all", "none none none mxfp4 none"),
        ("linear_hifp8", "fprop", "hifp8 none none none none"),
        ("linear_hifp8", "all", "hifp8 hifp8 hifp8 none none"),
        ("FA_linear_mxfp8", "fprop", "mxfp8 none none mxfp8 none"),
        ("mxfp8", "fprop", "mxfp8 none none mxfp8 mxfp8"),
        ("mxfp8", "all", "mxfp8 mxfp8 mxfp8 mxfp8 mxfp8"),
    ],
)
def test_a_mode_states_the_type_of_all_five_sites(mode, gemms, expected):
    types = tables.modes()[mode].types(gemms)
    assert list(types) == ["fprop", "dgrad", "wgrad", "qk", "pv"]
    assert " ".join(types.values()) == expected


def test_the_tables_and_the_quantizers_name_the_same_sites_and_types():
    pytest.importorskip("torch")
    from mqo.quant import formats

    assert tuple(formats.SITES) == tables.SITES
    assert (tables.NONE, *tables.quant_types(), *formats.FAMILIES) == formats.QUANT_TYPES


def test_the_documented_training_configurations():
    standard, fast = tables.trainings()["standard"], tables.trainings()["fast"]
    assert (standard.micro_batch, standard.global_batch, standard.sequence) == (1, 128, 8192)
    assert (standard.samples, standard.lr, standard.min_lr) == (47_340_000, 1.5e-4, 1e-5)
    assert (fast.global_batch, fast.sequence, fast.samples, fast.lr) == (32, 2048, 1000, 1e-4)
    assert not standard.is_smoke
    assert not fast.is_smoke
    assert tables.trainings()["smoke"].is_smoke


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(
        UnknownNameError, match=r"model .*'llama4'.*deepseek2_lite, llama31-8b, llama32-1b"
    ):
        tables.pick(tables.models(), "model", "llama4")


@pytest.mark.parametrize(
    ("mode", "linear", "attention", "name", "types"),
    [
        ("bf16", "mxfp8", "mxfp8", "FA_linear_mxfp8", "mxfp8 mxfp8 none"),
        ("bf16", None, "hifp8", "FA_hifp8", "none hifp8 none"),
        ("mxfp4", None, None, "mxfp4", "mxfp4 mxfp4 mxfp4"),
        ("mxfp4", "none", None, "qk_pv_mxfp4", "none mxfp4 mxfp4"),
        ("FA_linear_mxfp8", None, "none", "linear_mxfp8", "mxfp8 none none"),
        ("linear_mxfp8", None, "pv_hifp8", "linear_mxfp8_pv_hifp8", "mxfp8 none hifp8"),
        ("mxfp8", "mxfp8", "qk_pv_mxfp8", "mxfp8", "mxfp8 mxfp8 mxfp8"),
        ("qk_mxfp8", None, "mxfp8", "qk_mxfp8", "none mxfp8 none"),
        ("FA_linear_mxfp4", "none", "bf16", "bf16", "none none none"),
    ],
)
def test_a_mode_can_be_changed_and_is_then_called_what_it_is(mode, linear, attention, name, types):
    made = tables.changed(tables.modes()[mode], linear, attention)
    assert (made.name, " ".join(made.key)) == (name, types)


def test_a_mode_is_not_changed_into_what_does_not_exist():
    bf16 = tables.modes()["bf16"]
    with pytest.raises(UnknownNameError, match=r"linear layers .*'fp8'.*mxfp8"):
        tables.changed(bf16, linear="fp8")
    for name in ("fp8", "linear_mxfp8", "FA_linear_mxfp8"):
        with pytest.raises(UnknownNameError, match=rf"attention .*'{name}'.*qk_pv_T"):
            tables.changed(bf16, attention=name)


def test_the_front_end_for_attention_has_its_modes_of_every_type():
    names = [name for name, mode in tables.modes().items() if mode.front_end]
    types = tables.quant_types()
    sites = ("qk", "pv", "qk_pv")
    assert sorted(names) == sorted(["bf16", *(f"{site}_{t}" for site in sites for t in types)])
    assert {tables.modes()[name].linear for name in names} == {"none"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("all", list(tables.models())),
        ("llama*", ["llama32-1b", "llama31-8b"]),
        (" deepseek2_lite , llama31-8b", ["deepseek2_lite", "llama31-8b"]),
        ("llama31-8b,all", ["llama31-8b", "llama32-1b", "deepseek2_lite", "nemotron-h-8b"]),
    ],
)
def test_names_may_be_lists_and_globs_and_count_once(given, expected):
    assert tables.expand("model", tables.models(), given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("FA_linear_*", "FA_linear_mxfp8 FA_linear_mxfp4 FA_linear_hifp8"),
        ("FA_linear_h*4", "FA_linear_hif4"),
        ("linear_nvfp4,*_linear_mxfp4", "linear_nvfp4 FA_linear_mxfp4"),
    ],
)
def test_globs_mean_the_modes_of_the_types_with_scripts_where_they_match_any(given, expected):
    assert tables.expand_modes(given) == expected.split()


def test_all_modes_are_those_of_the_types_with_scripts():
    assert len(tables.expand_modes("all")) == 1 + 7 * 3


@pytest.mark.parametrize("given", ["gpt*", "llama32-1b,", "llama32-1b,gpt"])
def test_what_means_no_name_lists_the_valid_ones(given):
    with pytest.raises(UnknownNameError, match=r"model .*'.*deepseek2_lite, llama31-8b"):
        tables.expand("model", tables.models(), given)


def test_the_sites_are_those_that_the_overlay_looks_for_in_their_order():
    assert tables.MODE_SITES == gemms.SITES
    assert (*tables.MODE_SITES, *formats.ATTENTION_BACKWARD) == tables.SITES


def test_a_backward_product_of_attention_has_the_type_of_its_forward_product():
    mode = tables.Mode(name="mine", linear="mxfp8", qk="mxfp4")
    assert mode.types() == {
        "fprop": "mxfp8",
        "dgrad": "none",
        "wgrad": "none",
        "qk": "mxfp4",
        "pv": "none",
    }
    backward = {"qk_recompute": "mxfp4", "dq": "mxfp4", "dk": "mxfp4"}
    assert mode.types(attention_gemms="all") == mode.types() | backward
