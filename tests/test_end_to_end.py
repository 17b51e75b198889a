"""Short real runs through the launcher: what the system promises, seen in the run folders.

A few steps of the smoke model each; the same runs serve several tests.
"""

import json
import math
import os
import subprocess
import sys
import tomllib

import pytest
from mqo.errors import OverlayError, RunError
from mqo.matrix import tables
from mqo.overlay.apply import apply
from mqo.overlay.series import Series
from mqo.overlay.status import status
from mqo.overlay.tree import Tree
from mqo.report import stats

pytest.importorskip("torch")
from .real_runs import MODES, TINY, losses, stats_of
from .vendored_tree import PROJECT, commit_all

ATTENTION = "megatron/core/transformer/dot_product_attention.py"
DISTRIBUTED_BF16 = (
    "--bf16",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)


UNFUSED = ("--attention-backend", "unfused")


def test_bf16_is_bit_identical_to_a_source_without_quant_sites(start):
    # Upstream's own attention, which the bare source has alone.
    patched = start("bf16", flags=TINY + UNFUSED)
    bare = start("bf16", flags=TINY, without=("quant_sites",))
    assert losses(patched) == losses(bare)
    assert len(losses(patched)[0]) == 6
    text = (bare.source / "megatron/core/tensor_parallel/layers.py").read_text()
    assert "custom_quant_type" not in text
    assert "without_scores" not in (bare.source / ATTENTION).read_text()


def test_fused_attention_is_the_default_and_trains_to_the_same_loss(start):
    runs = start("bf16", flags=TINY), start("bf16", flags=TINY + UNFUSED)
    norms = [run.read_metrics()["grad-norm"] for run in runs]
    assert norms[0] != norms[1]  # the losses may be the same to the last digit
    fused, unfused = map(losses, runs)
    for (_, loss), (_, expected) in zip(fused[0] + fused[1], unfused[0] + unfused[1], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pv_mxfp4", "qk_pv_nvfp4"])
def test_probabilities_quantized_in_a_chunk_train_to_upstreams_bits(start, mode):
    chunked, unfused = (start(mode, flags=TINY + flags) for flags in ((), UNFUSED))
    assert losses(chunked) == losses(unfused)
    calls = [
        {(r["site"], r["operand"]): r["calls"] for r in stats_of(run)} for run in (chunked, unfused)
    ]
    assert calls[0] == calls[1]


# Documents of dolma are short enough that a sequence has several.
DOCUMENTS = ("--seq-length", "512", "--max-position-embeddings", "512")
DOCUMENTS += ("--micro-batch-size", "2", "--global-batch-size", "2", "--train-samples", "4")
BY_MASK = ("--reset-attention-mask", "--reset-position-ids")


@pytest.mark.slow
def test_documents_that_do_not_see_one_another(start):
    def trained(*flags):
        flags = (*TINY, *DOCUMENTS, *flags)
        return losses(start("qk_pv_mxfp8", dataset="dolma", flags=flags))

    plain, packed = trained(), trained("--dataloader-inter-document-masking")
    masked = trained(*BY_MASK)
    assert masked == trained(*BY_MASK, *UNFUSED)
    steps = list(zip(plain[0], packed[0], masked[0], strict=True))
    assert max(abs(one - other) for (_, one), _, (_, other) in steps) > 5e-4
    # What upstream takes for a document's end differs by a token.
    assert all(other == pytest.approx(one, abs=1e-4) for _, (_, one), (_, other) in steps)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("qk_pv_mxfp8", marks=pytest.mark.slow),
        pytest.param("bf16", marks=pytest.mark.heavy),
    ],
)
def test_documents_of_latent_attention(start, mode):
    rest = {"model": "deepseek2_lite", "training": "tiny", "dataset": "dolma"}
    packed, masked = (
        losses(start(mode, flags=DOCUMENTS + flags, **rest))
        for flags in (("--dataloader-inter-document-masking",), BY_MASK)
    )
    pairs = zip(packed[0], masked[0], strict=True)
    assert all(one == pytest.approx(other, abs=5e-4) for (_, one), (_, other) in pairs)


def test_fused_attention_that_is_demanded_of_a_pv_type_ends_the_run_with_the_reason(start):
    with pytest.raises(
        RunError,
        match=r"layers\.0\..*cannot run fused: no fused kernel quantizes",
    ):
        start("mxfp4", flags=("--attention-backend", "flash"))


@pytest.mark.slow
def test_packages_that_need_a_gpu_change_nothing_on_a_cpu(start, quantized, monkeypatch):
    stubs = PROJECT.root / "tests/stubs"
    paths = [str(stubs / name) for name in ("with_apex", "with_transformer_engine")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    # The same cell with another name for its folder: a run of its own.
    beside = start("FA_linear_mxfp8", flags=TINY, keep_checkpoints=9)  # no run of another test
    monkeypatch.delenv("PYTHONPATH")
    assert losses(beside) == losses(quantized)
    assert beside.read_implementation() == quantized.read_implementation()
    assert quantized.read_implementation() == {
        "norms": "torch.RMSNorm",
        "optimizers": "torch.AdamW",
        "fusions": "none",
    }


@pytest.fixture(scope="module")
def plain(start):
    """The run without a quantizer, which several tests read."""
    return start("bf16", flags=TINY)


@pytest.fixture(scope="module")
def quantized(start):
    """A run of two sites, whose coverage was measured."""
    return start("FA_linear_mxfp8", flags=TINY)


def test_a_quantized_run_differs(plain, quantized):
    assert losses(quantized) != losses(plain)


def test_the_run_folder_records_what_ran_by_site_and_layer(quantized):
    rows = stats_of(quantized)
    assert {row["site"] for row in rows} == {"fprop", "qk"}
    assert {row["quant_type"] for row in rows} == {"mxfp8"}
    layers = {row["layer"] for row in rows if row["site"] == "fprop"}
    expected = {
        f"decoder.layers.{i}.{name}"
        for i in range(2)
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    }
    assert layers == expected | {"output_layer"}
    attention = {row["layer"] for row in rows if row["site"] == "qk"}
    assert attention == {f"decoder.layers.{i}.self_attention.core_attention" for i in range(2)}
    # Six steps and an evaluation at the end, of two micro-batches each.
    assert {row["calls"] for row in rows} == {6 * 2 + 2}
    # The measured SQNR of an E4M3 block format with the floor rule: about 30 dB on bell shapes.
    assert all(25 < row["sqnr_db"] < 35 for row in rows)


def test_what_was_said_before_the_run_is_what_ran(quantized):
    said = json.loads(quantized.coverage.read_text())
    products = [p for p in said["products"] if not p["reason"]]
    assert {(p["gemm"], p["layer"], p["quant_type"]) for p in products} == {
        (row["site"], row["layer"], row["quant_type"]) for row in stats_of(quantized)
    }
    flops = sum(p["flops"] for p in products)
    assert said["quantized_share"] == pytest.approx(flops / said["flops"])
    table = quantized.coverage_table.read_text()
    assert "llama32-1b*, FA_linear_mxfp8, fprop GEMMs, smoke" in table


# One run has both sites; CI has each kind and each type, and the mode without a type.
SOON, CI = ("FA_linear_mxfp8",), ("bf16", "linear_hifp8", "FA_mxfp4")


def _marks(name):
    return () if name in SOON else pytest.mark.slow if name in CI else pytest.mark.heavy


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(mode.name, marks=_marks(mode.name))
        for mode in tables.modes().values()
        if mode.scripts
    ],
)
def test_each_mode_of_the_scripts_quantizes_its_own_sites_and_no_others(start, name):
    ran = {(row["site"], row["quant_type"]) for row in stats_of(start(name, flags=TINY))}
    expected = {"FA": {"qk"}, "linear": {"fprop"}, "FA_linear": {"qk", "fprop"}, "": set()}
    kind, _, quant_type = name.rpartition("_")
    assert ran == {(site, quant_type) for site in expected[kind]}


# Layers of MLA and of experts as small as TINY's.
TINY_EXPERTS = (
    *("--moe-layer-freq", "[0]*1+[1]*1", "--moe-ffn-hidden-size", "64"),
    *("--moe-shared-expert-intermediate-size", "64", "--kv-lora-rank", "32"),
    *("--qk-head-dim", "32", "--qk-pos-emb-head-dim", "32", "--v-head-dim", "32"),
)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", list(tables.script_models()))
def test_every_model_learns_in_every_mode(start, model, mode):
    """Minutes: a run for each. The guard is quiet, or the run would not have ended well."""
    flags = TINY + (TINY_EXPERTS if tables.models()[model].moe else ())
    run = start(mode, model=model, flags=flags)
    trained = [loss for _, loss in losses(run)[0]]
    assert len(trained) == 6
    assert all(math.isfinite(loss) for loss in trained)
    assert trained[-1] < trained[0]
    wanted = {(s, t) for s, t in tables.modes()[mode].types().items() if t != "none"}
    assert {(row["site"], row["quant_type"]) for row in stats_of(run)} == wanted
    if not wanted:
        bare = start(mode, model=model, flags=(*flags, *UNFUSED), without=("quant_sites",))
        assert losses(bare) == losses(start(mode, model=model, flags=(*flags, *UNFUSED)))


def test_an_unquantized_run_records_nothing(plain):
    assert stats_of(plain) == []


def test_the_source_of_a_run_is_its_own_and_complete(quantized):
    run = quantized
    linear = (run.source / "megatron/core/tensor_parallel/layers.py").read_text()
    assert linear.count("custom_quant_type = 'mxfp8'") == 1
    assert linear.count("custom_quant_type = 'none'") == 2
    shared = (PROJECT.tree / "megatron/core/tensor_parallel/layers.py").read_text()
    assert "mxfp8" not in shared
    diff = run.overlay_diff.read_text()
    assert "+        custom_quant_type = 'mxfp8'" in diff
    assert "+++ b/.mqo_runtime/mqo/megatron/device.py" in diff
    assert tomllib.loads(run.quant_config.read_text())["asked"]["qk"] == "mxfp8"


def test_a_run_changes_nothing_in_the_shared_tree(quantized):
    now = status(Tree(PROJECT.tree), Series.load(PROJECT.patches))
    assert now.clean
    assert {literal.value for _, literal in now.types} == {"none"}


@pytest.mark.slow
def test_a_site_that_is_asked_for_and_never_runs_ends_the_run_by_name(quantized, tmp_path):
    """The finished run again, its quant.toml asking for a PV type that the source does not have."""
    run = quantized
    asked = run.quant_config.read_text().replace('pv = "none"', 'pv = "mxfp4"')
    (tmp_path / "quant.toml").write_text(asked)
    command = run.command.read_text().replace(str(run.quant_config), str(tmp_path / "quant.toml"))
    command = command.replace(str(run.checkpoints), str(tmp_path / "checkpoints"))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode != 0
    failure = (tmp_path / "failure.txt").read_text()
    assert "pv: its type is mxfp4, but its quantizer never ran" in failure
    assert "iteration 1" in failure
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_excluded_layers_stay_unquantized_and_are_recorded_so(start, quantized):
    exclude = ("output_layer", "qk:decoder.layers.0.*")
    run = start("FA_linear_mxfp8", flags=TINY, exclude=exclude, dump=(2,))
    rows = stats_of(run)
    excluded = {(row["site"], row["layer"]) for row in rows if row["quant_type"] == "excluded"}
    assert excluded == {
        ("fprop", "output_layer"),
        ("qk", "decoder.layers.0.self_attention.core_attention"),
    }
    assert {row["calls"] for row in rows} == {row["calls"] for row in stats_of(quantized)}
    assert losses(run) != losses(quantized)
    dumped = stats.measure(PROJECT.tree, next(run.dumps.iterdir()), ["*fc1/x"], None)
    assert [table["name"] for table in dumped.tables] == [
        f"fprop/decoder.layers.{i}.mlp.linear_fc1/x" for i in range(2)
    ]


def test_the_quantizers_measure_the_first_iteration_and_an_unquantized_run_nothing(
    plain, quantized
):
    found = quantized.read_metrics()
    tag = "quant/qk/decoder.layers.0.self_attention.core_attention/query"
    assert [iteration for iteration, _ in found[f"{tag}/sqnr_db"]] == [1]
    assert 25 < found[f"{tag}/sqnr_db"][0][1] < 35
    assert 0 < found[f"{tag}/saturation"][0][1] < 0.05
    assert not [name for name in plain.read_metrics() if name.startswith("quant/")]


@pytest.mark.slow
def test_a_misspelt_exclude_ends_the_run_before_its_first_step(start):
    with pytest.raises(RunError, match=r"'output' matches no.*output_layer"):
        start("linear_mxfp8", exclude=("output",))


def test_layers_that_cannot_be_had_end_the_run(start):
    with pytest.raises(RunError, match=r"needs Transformer Engine.*`--transformer-impl local`"):
        start("linear_mxfp8", flags=("--transformer-impl", "transformer_engine"))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="fp32"),
        pytest.param(DISTRIBUTED_BF16, id="bf16-distributed", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.slow
def test_cached_weights_change_no_loss(start, flags):
    cached = start("mxfp8", gemms="all", flags=TINY + flags, cache_weights=True)
    plain = start("mxfp8", gemms="all", flags=TINY + flags)
    assert losses(cached) == losses(plain)
    assert len(losses(cached)[0]) == 6
    calls = [
        {(r["site"], r["layer"], r["operand"], r["calls"]) for r in stats_of(run)}
        for run in (cached, plain)
    ]
    assert calls[0] == calls[1]


@pytest.mark.slow
def test_packed_activations_are_another_recipe_and_only_for_wgrad(start):
    packed = start("linear_mxfp8", flags=TINY, save_activations="packed")
    plain = start("linear_mxfp8", flags=TINY)
    assert losses(packed)[0][0] == losses(plain)[0][0]  # before the first gradient
    assert losses(packed)[0][1:] != losses(plain)[0][1:]
    for (_, one), (_, two) in zip(losses(packed)[0], losses(plain)[0], strict=True):
        assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.slow
def test_multi_latent_attention_and_experts_quantize_what_was_said_before(start):
    run = start("mxfp8", model="deepseek2_lite", training="tiny")
    said = json.loads(run.coverage.read_text())
    ran = stats_of(run)
    quantized = {(p["gemm"], p["layer"]) for p in said["products"] if not p["reason"]}
    assert quantized == {(row["site"], row["layer"]) for row in ran}
    assert {row["quant_type"] for row in ran} == {"mxfp8"}
    parts = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "shared_experts")
    for part in (*parts, "local_experts.7", "core_attention"):
        assert [layer for _, layer in quantized if part in layer], part
    assert not [layer for _, layer in quantized if "router" in layer]
    note = "mqo: never quantized, because it has no site: decoder.layers.1.mlp.router (TopKRouter)"
    assert note in run.log.read_text().splitlines()
    trained = [loss for _, loss in losses(run)[0]]
    assert trained[-1] < trained[0]


def test_types_cannot_be_asked_of_a_source_without_sites(start):
    with pytest.raises(OverlayError, match=r"fprop = nothing.*Expected: mxfp8"):
        start("linear_mxfp8", without=("quant_sites",))


def test_a_flag_that_megatron_does_not_know_fails_with_its_words(start):
    with pytest.raises(RunError, match=r"unrecognized arguments: --no-such-flag"):
        start("bf16", flags=("--no-such-flag",))


def test_another_megatron_on_the_path_is_refused(plain, tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, plain.source / "pretrain_gpt.py", "--help"],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "megatron.core would come from nowhere" in done.stderr


# -- a checkout of one's own -----------------------------------------------------------------------


OWN_START = "if __name__ == '__main__':\n    main(time.time())"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A git work tree with upstream's files and a program that knows nothing of runs, patched."""
    root = tmp_path_factory.mktemp("a checkout") / "Megatron-LM"
    shared = Tree(PROJECT.tree)
    for path in shared.upstream().files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(shared.pristine(path))
    program = (PROJECT.tree / "megatron/inference/gpt/pretraining.py").read_text()
    for old, new in {
        "from . import": "from megatron.inference.gpt import",
        "from .": "from megatron.inference.gpt.",
        "import mqo.megatron.hooks\n": "",
        "with mqo.megatron.hooks.recorded(get_tensorboard_writer()):": "if True:",
        "mqo.megatron.hooks.before_model(args)": "pass",
    }.items():
        assert old in program
        program = program.replace(old, new)
    (root / "pretrain_gpt.py").write_text(f"{program}\n\n{OWN_START}\n")
    commit_all(root)
    apply(Tree(root), Series.of_project(PROJECT))
    return root


@pytest.mark.slow
def test_a_checkout_runs_by_its_own_program_with_the_runs_types(start, checkout):
    run = start("FA_linear_mxfp8", flags=TINY, megatron=checkout)
    assert (run.source / "pretrain_gpt.py").read_text().endswith(f"{OWN_START}\n")
    linear = "megatron/core/tensor_parallel/layers.py"
    assert (run.source / linear).read_text().count("custom_quant_type = 'mxfp8'") == 1
    assert "mxfp8" not in (checkout / linear).read_text()
    # The patched trainer has the guard; the losses come from TensorBoard's events, in fp32.
    assert not run.quant_stats.exists()
    ours, theirs = losses(start("FA_linear_mxfp8", flags=TINY)), losses(run)
    assert theirs == tuple([(n, pytest.approx(loss, rel=1e-6)) for n, loss in s] for s in ours)


@pytest.mark.slow
def test_the_guard_and_the_options_hold_in_a_checkout_too(start, checkout):
    with pytest.raises(RunError, match=r"GuardError: .*before the first step.*'output' matches no"):
        start("linear_mxfp8", flags=TINY, megatron=checkout, exclude=("output",))
