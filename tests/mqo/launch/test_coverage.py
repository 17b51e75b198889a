"""What a tree's source says it quantizes: the patched Megatron at toy and at real size.

One process a source, on the CPU; two at a time.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from mqo.errors import RunError
from mqo.launch import coverage
from mqo.launch.config import resolve
from mqo.launch.folder import create
from mqo.launch.prepare import RunData
from mqo.launch.products import AT_NONE, AUTOGRAD, NO_SITE
from mqo.launch.program_cache import Source
from mqo.overlay.series import Series
from mqo.project import Project
from mqo.quant.recipe import Recipe

# Two layers of width 64: 4 heads of 16, 2 groups, so qkv gives 64 + 2 x 32; SwiGLU doubles 96.
TOY = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "96"),
    *("--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--vocab-size", "256"),
    *("--micro-batch-size", "2", "--global-batch-size", "2"),
)
TOKENS, HEADS, SEQUENCE, HEAD = 2 * 32, 4, 32, 16
WEIGHTS = {
    "self_attention.linear_qkv": (128, 64),
    "self_attention.linear_proj": (64, 64),
    "mlp.linear_fc1": (192, 64),
    "mlp.linear_fc2": (64, 96),
}
SHAPES = {f"decoder.layers.{i}.{name}": shape for i in (0, 1) for name, shape in WEIGHTS.items()}
SHAPES["output_layer"] = (256, 64)
LINEAR = sum(2 * TOKENS * n * k for n, k in SHAPES.values())
SCORES = 2 * 2 * 2 * HEADS * SEQUENCE * SEQUENCE * HEAD  # a product of both layers, batch 2
HEAD_FLOPS = 2 * TOKENS * 256 * 64
LAYERS = LINEAR - HEAD_FLOPS  # without the head, which is not recomputed
TOTAL = 3 * LINEAR + 6 * SCORES


def toy(mode, **rest):
    flags = TOY + rest.pop("flags", ())
    return resolve("llama32-1b", "wikipedia", mode, "smoke", extra_flags=flags, **rest)


HALF = Recipe(
    name="half",
    summary="",
    source="",
    types={"fprop": "mxfp8", "dgrad": "mxfp4"},
    operands={"fprop.x": {"quant_type": "none"}},
)
LAST = Recipe(
    name="last",
    summary="",
    source="",
    types={"fprop": "mxfp8", "dgrad": "mxfp8"},
    rules=({"last": 1, "quant_type": "none"},),
)


def hybrid(pattern, mode, **rest):
    """A toy of these layers instead of the two of a GPT."""
    flags = (*TOY[2:], "--hybrid-layer-pattern", pattern)
    return resolve("llama32-1b", "wikipedia", mode, "smoke", extra_flags=flags, **rest)


CELLS = {
    "bf16": toy("bf16"),
    "FA": toy("FA_mxfp8"),
    "linear": toy("linear_mxfp8", gemms="all"),
    "attention": toy("FA_mxfp8", attention_gemms="all"),
    "excluded": toy("mxfp4", exclude=("output_layer", "qk:decoder.layers.0.*")),
    "included": toy("mxfp4", include=("output_layer", "attention:decoder.layers.0.*")),
    "half": toy("bf16", recipe=HALF),
    "bare": toy("bf16", without=("quant_sites",)),
    "last": toy("bf16", recipe=LAST),
    "last, hybrid": hybrid("*-*-", "bf16", recipe=LAST),
    "FA, hybrid": hybrid("*-*-", "FA_mxfp8"),
    "layers": hybrid("-**|-*--", "FA_linear_mxfp8"),
    "experts": resolve("deepseek2_lite", "wikipedia", "mxfp8", "smoke", gemms="all"),
    "experts, hybrid": resolve(
        "deepseek2_lite", "wikipedia", "mxfp8", "smoke", gemms="all", model_class="hybrid"
    ),
    "recomputed, split": toy(
        "hifp8",
        flags=(
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1", "--tensor-model-parallel-size", "2"),
        ),
    ),
}

OTHER_LAYERS = ("layers", "experts", "experts, hybrid")  # than those of the toy


@pytest.fixture(scope="module")
def measured(vendored, tmp_path_factory, checkout_with):
    """{name: coverage} of the toy cells; nothing is taken from the checkout's cache."""
    pytest.importorskip("torch")
    project = checkout_with(cache=tmp_path_factory.mktemp("cache"))
    series = Series.of_project(project)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda c: coverage.of_config(project, vendored, series, c), CELLS.values())
        return dict(zip(CELLS, found, strict=True))


def quantized(found):
    """{(GEMM, type): FLOPs} of what is."""
    return {key: round(share * found.flops) for key, share in found.shares.items()}


@pytest.mark.slow
def test_the_flops_are_those_computed_by_hand(measured):
    for name in ("bf16", "FA", "linear", "bare"):
        assert measured[name].flops == TOTAL
    assert measured["excluded"].flops == TOTAL
    assert measured["recomputed, split"].flops == TOTAL + LAYERS + 2 * SCORES
    norms = (2 * 2 + 1) * 64
    assert measured["bf16"].parameters == sum(n * k for n, k in SHAPES.values()) + norms


QUANTIZED = {
    "bf16": {},
    "FA": {("qk", "mxfp8"): SCORES},
    "linear": {(site, "mxfp8"): LINEAR for site in ("fprop", "dgrad", "wgrad")},
    "recomputed, split": {
        ("fprop", "hifp8"): LINEAR + LAYERS,
        ("qk", "hifp8"): 2 * SCORES,
        ("pv", "hifp8"): 2 * SCORES,
    },
    "excluded": {
        ("fprop", "mxfp4"): LINEAR - HEAD_FLOPS,
        ("qk", "mxfp4"): SCORES // 2,
        ("pv", "mxfp4"): SCORES,
    },
    "included": {
        ("fprop", "mxfp4"): HEAD_FLOPS,
        ("qk", "mxfp4"): SCORES // 2,
        ("pv", "mxfp4"): SCORES // 2,
    },
    "half": {("dgrad", "mxfp4"): LINEAR - HEAD_FLOPS},  # one operand of fprop is not quantized
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_quantized_follows_types_layers_and_operands(measured, name):
    assert quantized(measured[name]) == QUANTIZED[name]


def test_a_product_of_one_unquantized_operand_says_which(measured):
    reasons = {p.reason for p in measured["half"].products if p.gemm == "fprop"}
    assert reasons == {AT_NONE, "not quantized: x"}


SOURCED = """types = { fprop = "mxfp8", dgrad = "mixed", wgrad = "mixed" }
[operands]
"dgrad.grad" = { quant_type = "none" }
"dgrad.weight" = { quant_type = "none", source = "fprop" }
"wgrad.grad" = { quant_type = "none" }
"wgrad.x" = { quant_type = "none", source = "fprop" }
"""
ONE = 'types = { fprop = "mxfp8" }\n[operands]\n"fprop.x" = { quant_type = "none" }\n'
NO_MLP = '[[rules]]\nlayers = "*.mlp.*"\nquant_type = "none"\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "share"),
    [
        (SOURCED, None),  # gradients are unquantized on purpose
        (SOURCED + NO_MLP, "at fprop;"),
        (ONE, "quantizes 0.0%"),
    ],
)
def test_a_recipe_must_quantize_most_of_what_it_is_for(
    vendored, checkout_with, tmp_path, text, share
):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    config = toy("bf16", recipe=Recipe.load(path))
    project = checkout_with(cache=tmp_path / "cache")
    found = coverage.of_config(project, vendored, Series.of_project(project), config)
    if share is None:
        coverage.check_share(config, found)
        return
    with pytest.raises(RunError, match=share):
        coverage.check_share(config, found)
    allowed = toy("bf16", recipe=Recipe.load(path), allow_mostly_unquantized=True)
    coverage.check_share(allowed, found)


def test_a_recipe_for_attention_alone_may_leave_linear_layers_unquantized(measured):
    recipe = Recipe(name="own", summary="", source="", types={"qk": "mxfp8"})
    coverage.check_share(toy("bf16", recipe=recipe), measured["FA"])


def test_every_linear_layer_has_its_three_products_with_their_shapes(measured):
    found = {(p.layer, p.gemm): (p.m, p.n, p.k) for p in measured["linear"].products}
    for layer, (n, k) in SHAPES.items():
        assert found[layer, "fprop"] == (TOKENS, n, k)
        assert found[layer, "dgrad"] == (TOKENS, k, n)
        assert found[layer, "wgrad"] == (n, k, TOKENS)
    assert len(measured["linear"].products) == 3 * len(SHAPES) + 2 * (2 + 4)


def test_attentions_products_are_batched_over_heads(measured):
    layer = "decoder.layers.1.self_attention.core_attention"
    rows = [p for p in measured["FA"].products if p.layer == layer]
    shapes = [(p.gemm, p.quant_type, p.batch, p.m, p.n, p.k) for p in rows]
    assert shapes[:2] == [
        ("qk", "mxfp8", 2 * HEADS, SEQUENCE, SEQUENCE, HEAD),
        ("pv", "none", 2 * HEADS, SEQUENCE, HEAD, SEQUENCE),
    ]
    assert {s[:2] for s in shapes[2:]} == {(name, "none") for name in ("dv", "dp", "dq", "dk")}
    assert {p.reason for p in rows[2:]} == {AT_NONE}
    sizes = {gemm: row for gemm, *row in (s[:1] + s[3:] for s in shapes[2:])}
    assert sizes["dp"] == [SEQUENCE, SEQUENCE, HEAD]
    assert sizes["dv"] == sizes["dq"] == [SEQUENCE, HEAD, SEQUENCE]
    assert sizes["dk"] == [HEAD, SEQUENCE, SEQUENCE]


def test_attentions_backward_products_have_their_types(measured):
    rows = [p for p in measured["attention"].products if p.layer.endswith("core_attention")]
    types = {p.gemm: p.quant_type for p in rows}
    assert types == dict.fromkeys(("qk", "qk_recompute", "dq", "dk"), "mxfp8") | dict.fromkeys(
        ("pv", "dv", "dp"), "none"
    )
    assert {p.calls for p in rows} == {1}


def test_reasons(measured):
    assert {p.reason for p in measured["linear"].products} == {"", AT_NONE}
    assert {p.reason for p in measured["bf16"].products} == {AT_NONE}
    bare = measured["bare"].products
    assert {p.reason for p in bare} == {NO_SITE, AUTOGRAD}
    # Without a site the module says which layer it is.
    assert set(SHAPES) < {p.layer for p in bare}


def test_the_tied_head_multiplies_and_the_embedding_looks_up(measured):
    toys = [found for name, found in measured.items() if name not in OTHER_LAYERS]
    assert {found.lookups for found in measured.values()} == {("embedding.word_embeddings",)}
    assert {found.parameters for found in toys} == {measured["bf16"].parameters}


def test_multi_latent_attention_and_every_expert_have_their_sites(measured):
    model, found = CELLS["experts"].experiment.model, measured["experts"]
    sites = {}
    for product in found.products:
        if not product.gemm.endswith("backward"):
            sites.setdefault(product.layer, {})[product.gemm] = product.quant_type
    layers = range(model.num_layers)
    experts = [f"experts.local_experts.{i}" for i in range(model.moe.num_experts)]
    mlps = [
        f"decoder.layers.{i}.mlp.{mlp}" for i in layers[1:] for mlp in ["shared_experts", *experts]
    ]
    linear = {f"{mlp}.linear_fc{i}" for mlp in ["decoder.layers.0.mlp", *mlps] for i in (1, 2)}
    for name in ("q_proj", "kv_down_proj", "kv_up_proj", "proj"):
        linear |= {f"decoder.layers.{i}.self_attention.linear_{name}" for i in layers}
    linear.add("output_layer")
    attention = {f"decoder.layers.{i}.self_attention.core_attention" for i in layers}
    backward = dict.fromkeys(("dv", "dp", "dq", "dk"), "none")
    routers = {f"decoder.layers.{i}.mlp.router" for i in layers[1:]}
    assert sites == {
        **{layer: dict.fromkeys(("fprop", "dgrad", "wgrad"), "mxfp8") for layer in linear},
        **{layer: {"qk": "mxfp8", "pv": "mxfp8"} | backward for layer in attention},
        **{layer: {"mm": None} for layer in routers},
    }


def test_experts_get_top_k_of_the_tokens(measured):
    moe, tokens = CELLS["experts"].experiment.model.moe, 4 * 256
    rows = [p for p in measured["experts"].products if p.gemm == "fprop" and "1.mlp.exp" in p.layer]
    assert {p.m for p in rows} == {tokens * moe.topk // moe.num_experts}
    assert {p.n for p in rows if p.layer.endswith("fc1")} == {2 * moe.expert_ffn_size}


def test_a_latent_heads_keys_are_wider_than_its_values(measured):
    mla, heads = (
        CELLS["experts"].experiment.model.mla,
        CELLS["experts"].experiment.model.num_attention_heads,
    )
    layer = "decoder.layers.1.self_attention.core_attention"
    rows = {p.gemm: p for p in measured["experts"].products if p.layer == layer}
    assert (rows["qk"].k, rows["pv"].n) == (
        mla.qk_head_dim + mla.qk_pos_emb_head_dim,
        mla.v_head_dim,
    )
    assert rows["qk"].batch == rows["pv"].batch == 4 * heads


def test_recomputation_quantizes_twice(measured):
    found = measured["recomputed, split"].products
    calls = {(p.layer, p.gemm): p.calls for p in found if not p.reason}
    assert {key for key, n in calls.items() if n == 1} == {("output_layer", "fprop")}
    assert set(calls.values()) == {1, 2}
    assert {p.reason for p in found} == {"", AT_NONE}


@pytest.mark.parametrize("name", ["last", "FA", "experts"])
def test_a_hybrid_model_of_a_gpts_layers_has_its_shares(measured, name):
    gpt, other = measured[name], measured[f"{name}, hybrid"]
    assert other.shares == gpt.shares != {}
    assert (other.flops, other.parameters) == (gpt.flops, gpt.parameters)
    if name == "last":
        layers = {p.layer for p in other.products if not p.reason}
        assert layers == {
            *(f"decoder.layers.0.self_attention.linear_{part}" for part in ("qkv", "proj")),
            *(f"decoder.layers.1.mlp.linear_{part}" for part in ("fc1", "fc2")),
        }


def test_layers_that_are_no_blocks_of_a_gpt_are_counted_one_by_one(measured):
    found = measured["layers"]
    attention, mlp = 128 * 64 + 64 * 64, 192 * 64 + 64 * 96
    linear = 2 * TOKENS * (3 * attention + 4 * mlp + 256 * 64)
    qk = 3 * SCORES // 2
    assert quantized(found) == {("fprop", "mxfp8"): linear, ("qk", "mxfp8"): qk}
    assert found.flops == 3 * linear + 6 * qk


# {model: widths of all heads together, of keys and of values}
SCORES_OF = {
    "llama31-8b": (4096, 4096),
    "deepseek2_lite": (16 * 192, 16 * 128),
}


@pytest.mark.parametrize(("name", "scores"), SCORES_OF.items())
@pytest.mark.slow
def test_a_real_model_is_measured_at_its_real_size(vendored, name, scores):
    pytest.importorskip("torch")
    project = Project.here()
    cell = resolve(name, "wikipedia", "FA_linear_mxfp8", "standard")
    found = coverage.of_config(project, vendored, Series.of_project(project), cell)
    model, tokens = cell.experiment.model, cell.experiment.training.sequence
    assert found.parameters == model.parameters
    # Every weight of a product once a token, in each of three products.
    linear = 2 * tokens * (model.parameters - unmultiplied(model))
    routers = 2 * tokens * router_weights(model)
    qk, pv = (2 * model.num_layers * tokens * tokens * width for width in scores)
    assert quantized(found) == {("fprop", "mxfp8"): linear - routers, ("qk", "mxfp8"): qk}
    assert found.flops == 3 * linear + 3 * qk + 3 * pv


def unmultiplied(model):
    """Weights that a token is in no product with: norms, lookups, experts it is not sent to."""
    norms = (2 * model.num_layers + 1) * model.hidden_size
    lookup = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if model.moe is None:
        return norms + lookup
    latents = model.num_layers * model.mla.kv_lora_rank
    expert = 3 * model.hidden_size * model.moe.expert_ffn_size
    idle = (model.num_layers - model.moe.dense_layers) * (model.moe.num_experts - model.moe.topk)
    return norms + lookup + latents + idle * expert


def router_weights(model):
    if model.moe is None:
        return 0
    layers = model.num_layers - model.moe.dense_layers
    return layers * model.hidden_size * model.moe.num_experts


# -- the program's process, with one of our own in its place --------------------------------------

SAYS = """
from pathlib import Path

SIZES = dict(batch=1, m=1, n=1, k=1, calls=1, flops=2)

def measure(flags: list[str]):
    count = Path(__file__).with_name("count")
    count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))
    row = dict(layer="up", gemm="fprop", quant_type="mxfp8", **SIZES)
    return dict(micro_batch=1, sequence=8, parameters=9, flops=2, products=[row], lookups=[])
"""


@pytest.fixture
def place(tmp_path):
    """A project without content, and a run folder whose source holds the small program."""
    folder = create(tmp_path / "runs", "title")
    (folder.source / "tools").mkdir(parents=True)
    (folder.source / "tools/coverage.py").write_text(SAYS)
    return Project(tmp_path), folder


def count(folder):
    return int((folder.source / "tools/count").read_text())


def test_what_the_program_said_is_kept_by_source_and_flags(place):
    project, folder = place
    first = coverage.measure(project, Source(folder.source), ["--a"])
    assert coverage.measure(project, Source(folder.source), ["--a"]) == first
    assert count(folder) == 1
    coverage.measure(project, Source(folder.source), ["--b"])
    assert count(folder) == 2
    (folder.source / "layers.py").write_text("custom_quant_type = 'mxfp4'\n")
    coverage.measure(project, Source(folder.source), ["--a"])
    assert count(folder) == 3


def test_a_kept_answer_that_was_cut_short_is_asked_for_again(place):
    project, folder = place
    first = coverage.measure(project, Source(folder.source), [])
    (kept,) = (project.cache / "coverage").iterdir()
    kept.write_text(kept.read_text()[:40])
    assert coverage.measure(project, Source(folder.source), []) == first
    assert count(folder) == 2


def test_a_program_that_fails_is_told_in_its_words_and_nothing_is_kept(place):
    project, folder = place
    (folder.source / "tools/coverage.py").write_text("raise ValueError('no such head size')")
    with pytest.raises(RunError, match=r"exit code 1: ValueError: no such head size"):
        coverage.measure(project, Source(folder.source), [])
    assert list((project.cache / "coverage").iterdir()) == []


CONFIG = resolve("llama32-1b", "wikipedia", "linear_mxfp8", "smoke")


def test_a_run_records_it(place):
    project, folder = place
    said = []
    coverage.record(project, folder, CONFIG, RunData(folder.root, folder.root, 4096), said.append)
    facts = json.loads(folder.coverage.read_text())
    assert (facts["model"], facts["mode"], facts["quantized_share"]) == (
        "llama32-1b",
        "linear_mxfp8",
        1.0,
    )
    assert "up\n  fprop" in folder.coverage_table.read_text()
    assert said == [
        "coverage : 100.0% of a step's matrix-product FLOPs quantized (fprop mxfp8 100.0%)"
    ]


def test_another_tokenizer_at_the_same_place_is_asked_for_again(place, tmp_path):
    project, folder = place
    data = RunData(tmp_path, tmp_path, None)
    for content in ("{}", "{}", "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        coverage.record(project, folder, CONFIG, data, lambda text: None)
    assert count(folder) == 2


def test_a_run_goes_on_without_it(place):
    project, folder = place
    (folder.source / "tools/coverage.py").write_text("raise ValueError('too new')")
    said = []
    coverage.record(project, folder, CONFIG, RunData(folder.root, folder.root, 4096), said.append)
    (line,) = said
    assert line.startswith("coverage : ") and "ValueError: too new" in line
    assert not folder.coverage.exists()
