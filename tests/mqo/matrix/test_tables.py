"""The tables: what they hold agrees with what is published, and with itself."""

import pytest
from mqo.errors import UnknownNameError
from mqo.matrix import tables


def parameters(model: tables.Model) -> int:
    """Count the weights of a GPT with grouped queries, SwiGLU and RMSNorm, by its shapes."""
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    head = hidden // heads
    attention = hidden * head * (heads + 2 * groups) + heads * head * hidden
    mlp = 3 * hidden * model.ffn_hidden_size
    layer = attention + mlp + 2 * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tied_embeddings else 2)
    return model.num_layers * layer + embeddings + hidden


@pytest.mark.parametrize("name", tables.models())
def test_shapes_add_up_to_the_published_total(name):
    model = tables.models()[name]
    assert parameters(model) == model.parameters


@pytest.mark.parametrize("name", tables.models())
def test_a_shrunk_model_keeps_its_kind(name):
    full, small = tables.models()[name], tables.models()[name].shrunk(8, 4)
    assert small.num_layers * 4 == full.num_layers
    assert small.hidden_size * 8 == full.hidden_size
    ratio = full.num_attention_heads // full.num_query_groups
    assert small.num_attention_heads == ratio * small.num_query_groups
    assert small.num_query_groups > 1, "grouped-query attention must not become multi-query"
    assert small.hidden_size % small.num_attention_heads == 0
    assert small.hidden_size // small.num_attention_heads % 32 == 0, "heads hold whole MX blocks"
    assert small.tied_embeddings == full.tied_embeddings


def test_ten_modes_have_scripts():
    names = [name for name, mode in tables.modes().items() if mode.scripts]
    expected = ["bf16"]
    for prefix in ("FA_", "linear_", "FA_linear_"):
        expected += [f"{prefix}{quant_type}" for quant_type in ("mxfp8", "mxfp4", "hifp8")]
    assert sorted(names) == sorted(expected)


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


def test_the_tables_and_the_quantisers_name_the_same_sites_and_types():
    pytest.importorskip("torch")
    import megatron.quant as quant

    assert tuple(quant.SITES) == tables.SITES
    assert {*quant.QUANT_TYPES} == {tables.NONE, *tables.quant_types()}


def test_the_documented_training_configurations():
    standard, fast = tables.trainings()["standard"], tables.trainings()["fast"]
    assert (standard.micro_batch, standard.global_batch, standard.sequence) == (1, 128, 8192)
    assert (standard.samples, standard.lr, standard.min_lr) == (47_340_000, 1.5e-4, 1e-5)
    assert (fast.global_batch, fast.sequence, fast.samples, fast.lr) == (32, 2048, 1000, 1e-4)
    assert not standard.is_smoke
    assert not fast.is_smoke
    assert tables.trainings()["smoke"].is_smoke


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UnknownNameError, match=r"no model called 'llama4'.*llama31-8b, llama32-1b"):
        tables.pick(tables.models(), "model", "llama4")
