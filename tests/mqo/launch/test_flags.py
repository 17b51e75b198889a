"""A model's flags: upstream's own, and with upstream's defaults the published model."""

import ast
import json
import os
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.data.pair_check import HEADER, MAGIC, document_count
from mqo.launch import arguments
from mqo.launch.config import Cluster, Placement, resolve
from mqo.launch.flags import RunData, _split, architecture_flags, megatron_flags
from mqo.launch.machine import imagined
from mqo.launch.plan import plan_layout
from mqo.matrix import generate, tables
from mqo.recipes import recipe as recipes
from mqo.runs import RunFolder

from ... import forking
from ...get_packages import ENGINE_WHEELS, ENGINES, ROOT

NEWEST = next(iter(ENGINE_WHEELS))
NOWHERE = RunData(Path("none"), Path("none"), None), RunFolder(Path("none")), Path("none")


def flags(model, training="standard"):
    """{flag: its values, joined} of the model's own flags."""
    of = resolve(model, "wikipedia", "bf16", training).experiment
    found = {}
    for word in architecture_flags(of.model, of.training.sequence):
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return {flag: " ".join(values) for flag, values in found.items()}


def test_multi_latent_attention_with_experts_is_as_published():
    found = flags("deepseek2_lite")
    expected = {
        "--num-layers": "27",
        "--hidden-size": "2048",
        "--ffn-hidden-size": "10944",
        "--num-attention-heads": "16",
        "--multi-latent-attention": "",
        "--qk-layernorm": "",
        "--kv-lora-rank": "512",
        "--qk-head-dim": "128",
        "--qk-pos-emb-head-dim": "64",
        "--v-head-dim": "128",
        "--normalization": "RMSNorm",
        "--norm-epsilon": "1e-06",
        "--rope-type": "yarn",
        "--rotary-base": "10000",
        "--rotary-scaling-factor": "40",
        "--mscale": "0.707",
        "--mscale-all-dim": "0.707",
        "--num-experts": "64",
        "--moe-layer-freq": "[0]*1+[1]*26",
        "--moe-ffn-hidden-size": "1408",
        "--moe-shared-expert-intermediate-size": "2816",
        "--moe-router-topk": "6",
        "--moe-router-score-function": "softmax",
        "--moe-router-pre-softmax": "",
        "--moe-router-load-balancing-type": "seq_aux_loss",
        "--moe-aux-loss-coeff": "0.001",
        "--untie-embeddings-and-output-weights": "",
    }
    assert {flag: found.get(flag) for flag in expected} == expected
    absent = ("--q-lora-rank", "--group-query-attention", "--use-rope-scaling")
    absent += ("--moe-grouped-gemm", "--moe-router-topk-scaling-factor")
    assert not set(absent) & set(found)


@pytest.mark.parametrize(("model", "factor"), [("llama32-1b", "32"), ("llama31-8b", "8")])
def test_grouped_queries_have_llama_3s_scaling_and_no_experts(model, factor):
    found = flags(model)
    assert (found["--use-rope-scaling"], found["--rope-scaling-factor"]) == ("", factor)
    assert (found["--rotary-base"], found["--num-query-groups"]) == ("500000", "8")
    assert not [flag for flag in found if "moe" in flag or "latent" in flag or "mscale" in flag]


def test_a_shrunk_models_layers_stay_dense_first():
    found = flags("deepseek2_lite", "smoke")
    assert found["--moe-layer-freq"] == f"[0]*1+[1]*{int(found['--num-layers']) - 1}"


@pytest.mark.parametrize("model", tables.script_models())
def test_a_model_is_trained_no_longer_than_published(model):
    lengths = {name: int(flags(model, name)["--seq-length"]) for name in tables.trainings()}
    longest = tables.models()[model].train_sequence
    assert lengths == {"tiny": 64, "study": 256, "smoke": 256, "fast": 2048, "standard": longest}


# -- the schedule, and what is held out ------------------------------------------------------------


@pytest.mark.parametrize("training", ["fast", "standard"])
def test_a_real_configuration_warms_up_for_some_steps_and_not_for_long(training):
    """In upstream's terms: the share of the samples, each step a global batch of them."""
    config = tables.trainings()[training]
    steps = config.warmup_fraction * config.samples / config.global_batch
    assert 3 <= steps <= config.samples / config.global_batch / 10


def split(training, documents=None):
    return _split(tables.trainings()[training], documents)


def held_out(split, documents):
    """How many documents of so many upstream gives to training and to validation."""
    weights = [float(weight) for weight in split.split(",")]
    bounds = [sum(weights[:n]) / sum(weights) for n in range(3)]
    edges = [round(bound * float(documents)) for bound in bounds]
    return edges[1] - edges[0], edges[2] - edges[1]


def test_small_models_hold_out_a_tenth():
    for training in ("smoke", "tiny", "study"):
        assert split(training) == split(training, 5) == split(training, 1000) == "90,10,0"


def test_the_standard_configuration_holds_out_what_it_reads():
    config = tables.trainings()["standard"]
    evaluations = config.iterations // config.eval_interval + 1
    read = evaluations * config.eval_iters * config.global_batch
    assert split("standard") == "99,1,0"
    assert read / config.samples == pytest.approx(config.held_out, rel=0.01)


@given(
    documents=st.integers(2, 3000) | st.integers(2, 10**9),
    training=st.sampled_from(list(tables.trainings())),
)
def test_a_small_corpus_still_has_a_document_of_each_kind(training, documents):
    """Without one upstream counts the epochs of no text, and never ends."""
    train, valid = held_out(split(training, documents), documents)
    assert train > 0
    assert valid > 0
    assert valid <= max(1, round(0.1 * documents) + 1)


def test_the_documents_of_the_users_data_are_counted(tmp_path, monkeypatch):
    head = HEADER.pack(*MAGIC, 8, 12, 8)  # 12 sequences in 7 documents
    (tmp_path / "data.idx").write_bytes(head + bytes(100))
    assert document_count(tmp_path / "data") == 7
    (tmp_path / "data.idx").write_bytes(head[:-1])
    assert document_count(tmp_path / "data") is None
    assert document_count(tmp_path / "none") is None


@pytest.mark.parametrize("own", [(), ("--reset-attention-mask",)])
def test_a_mask_is_made_of_documents_alone(own):
    config = resolve("llama32-1b", "dolma", "bf16", "tiny", extra_flags=own)
    words = megatron_flags(config, imagined("h100-80gb", 1), *NOWHERE)
    assert ("--no-create-attention-mask-in-dataloader" in words) == (not own)


@pytest.mark.parametrize(
    ("own", "hashed"),
    [((), True), (("--ckpt-format", "torch_dist"), True), (("--ckpt-format", "torch_dcp"), False)],
)
def test_only_the_format_that_upstream_hashes_is_hashed(own, hashed):
    config = resolve("llama32-1b", "wikipedia", "bf16", "tiny", extra_flags=own)
    words = megatron_flags(config, imagined("h100-80gb", 1), *NOWHERE)
    assert ("--verify-integrity" in words) == hashed


@pytest.mark.parametrize("hashes", [True, False])
def test_a_checkout_without_the_flag_is_not_asked_to_hash(tmp_path, hashes):
    file = tmp_path / "megatron/training/checkpointing.py"
    file.parent.mkdir(parents=True)
    file.write_text("if args.verify_integrity: pass\n" if hashes else "")
    config = resolve("llama32-1b", "wikipedia", "bf16", "tiny", megatron=tmp_path)
    words = megatron_flags(config, imagined("h100-80gb", 1), *NOWHERE)
    assert ("--verify-integrity" in words) == hashes


def test_checkpoints_stay_as_the_configuration_says_unless_the_user_does():
    def kept(training, **rest):
        made = resolve("llama32-1b", "wikipedia", "bf16", training, **rest)
        return tomllib.loads(made.quant_toml({})).get("run", {}).get("keep_checkpoints", 0)

    assert [kept(name) for name in tables.trainings()] == [0, 0, 0, 0, 3]
    assert kept("standard", keep_checkpoints=0) == 0
    assert kept("tiny", keep_checkpoints=2, checkpoint=Path("checkpoints")) == 2


# -- upstream's own parser -------------------------------------------------------------------------

PARSE = """
import argparse, contextlib, json, os, sys
sys.path.insert(0, sys.argv[1])
from megatron.training import arguments

# Its thousand options are added once, which takes longer than all else.
full = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
arguments.add_megatron_arguments = lambda empty: full
found = []
for world, words in json.load(open(sys.argv[2])):
    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = ["pretrain_gpt.py", *words]
    with contextlib.redirect_stdout(sys.stderr):
        args = arguments.parse_args()
        arguments.validate_args(args)
    types = (args.hidden_size, args.seq_length, args.global_batch_size, str(args.params_dtype))
    found.append([*types, args.distributed_backend, args.transformer_impl, args.fp8_recipe])
print(json.dumps(found))
"""
WITH_ENGINE = """
import sys
sys.path[:0] = [sys.argv[1], "."]
import tests.mqo.megatron.transformer_engine.installed
"""
BF16 = "torch.bfloat16"


def cell_of_script(name, training):
    """The cell that a committed script's own words name."""
    script = Path(generate.__file__).parents[3] / "script" / name
    words = shlex.split(script.read_text().partition('train_config.py"')[2], comments=True)
    args = [word for word in words if word.strip() and word != "$@"]
    return arguments.config_from(
        arguments.parser().parse_args([*args, "--training-config", training]), []
    )


def on(cell, processes):
    where = Placement(cluster=Cluster(nproc_per_node=processes))
    return cell.model_copy(update={"placement": where})


def parse(run, code, tree, asked, folder, **variables):
    """What a tree's own parser finds in the words of each process count."""
    file = folder / "words.json"
    file.write_text(json.dumps(list(asked)))
    command = [sys.executable, "-W", "ignore", "-c", code, tree.root, file]
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    done = run(command, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_upstreams_parser_takes_the_flags_of_every_script(vendored, tmp_path):
    """All cells in each training configuration, on one CPU and on eight GPUs; equal ones once."""
    pytest.importorskip("torch")
    asked = {}
    names = [str(path) for path, _ in generate.scripts()]
    for name in names:
        for training in tables.trainings():
            cell = cell_of_script(name, training)
            for gpus in (0, 8):
                # The smallest batch of all is one for a single process.
                world = 1 if cell.experiment.training.is_smoke else max(1, gpus)
                machine = imagined("h100-80gb", gpus)
                cell, _ = plan_layout(
                    vendored.root, on(cell, world), machine, cell.quantization.types
                )
                assert bool(cell.placement.layout) == (world == 8)
                words = tuple(megatron_flags(cell, machine, *NOWHERE))
                asked[(world, words)] = cell, gpus
    assert len(asked) == len(tables.script_models()) * len(tables.trainings()) * 2
    parsed = parse(forking.run, PARSE, vendored, asked, tmp_path, CUDA_VISIBLE_DEVICES="")
    for (cell, gpus), found in zip(asked.values(), parsed, strict=True):
        assert found == [
            cell.experiment.model.hidden_size,
            cell.experiment.training.sequence,
            cell.experiment.training.global_batch,
            "torch.float32" if cell.experiment.training.is_smoke else BF16,
            "nccl" if gpus else "gloo",
            "local",
            "delayed",  # upstream's default, without effect
        ]


@pytest.mark.skipif(not (ENGINES / NEWEST).exists(), reason="python tests/get_packages.py")
def test_upstreams_parser_takes_every_mode_and_recipe_with_transformer_engine(vendored, tmp_path):
    """With its real Python code, whose version and parts upstream's validation looks at."""
    pytest.importorskip("torch")
    words, given = {}, ("--transformer-impl", "transformer_engine", "--bf16")
    machine = imagined("h100-80gb", 0)
    for model in tables.script_models():
        cells = [(mode, {"gemms": "all"}) for mode in tables.modes()]
        cells += [("bf16", {"recipe": recipes.read(name)}) for name in recipes.names()]
        for mode, rest in cells:
            of = resolve(model, "dolma", mode, "tiny", extra_flags=given, **rest)
            found = tuple(megatron_flags(of, machine, *NOWHERE))
            types = of.quantization.types
            quantizes = any(types[site] != "none" for site in tables.LINEAR_SITES["all"])
            words[(1, found)] = quantizes
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    code = WITH_ENGINE + PARSE
    parsed = parse(run, code, vendored, words, tmp_path, MQO_TEST_ENGINE=NEWEST)
    for quantizes, found in zip(words.values(), parsed, strict=True):
        assert found[-2:] == ["transformer_engine", "custom" if quantizes else "delayed"]


# -- what upstream has no flags for ----------------------------------------------------------------


def test_upstreams_defaults_of_yarn_are_the_published_values(vendored):
    """Its multi-latent attention reads them from the config, which has no flags for them."""
    path = "megatron/core/transformer/transformer_config.py"
    fields = definition(vendored, path, "MLATransformerConfig").body
    named = [node for node in fields if isinstance(node, ast.AnnAssign) and node.value]
    found = {node.target.id: literal(node.value) for node in named}
    yarn = tables.models()["deepseek2_lite"].rope
    assert found["original_max_position_embeddings"] == yarn.original
    assert (found["beta_fast"], found["beta_slow"]) == (yarn.beta_fast, yarn.beta_slow)
    # The parser's names differ, so no argument overwrites these fields.
    arguments = vendored.read("megatron/training/arguments.py").decode()
    for flag in ("--original-max-position-embeddings", "--beta-fast", "--beta-slow"):
        assert f"'{flag}'" not in arguments


@pytest.mark.parametrize("model", ["llama32-1b", "llama31-8b"])
def test_upstreams_defaults_of_llama_3s_scaling_are_the_published_values(vendored, model):
    path = "megatron/core/models/common/embeddings/rotary_pos_embedding.py"
    scaling = definition(vendored, path, "_apply_scaling").args
    names = [argument.arg for argument in scaling.args][-len(scaling.defaults) :]
    found = dict(zip(names, map(literal, scaling.defaults), strict=True))
    rope = tables.models()[model].rope
    assert (found["low_freq_factor"], found["high_freq_factor"]) == (rope.low, rope.high)
    assert found["original_max_position_embeddings"] == rope.original


def definition(tree, path, name):
    """The class or function of that name."""
    nodes = ast.walk(ast.parse(tree.read(path)))
    (found,) = [node for node in nodes if getattr(node, "name", None) == name]
    return found


def literal(node):
    return node.value if isinstance(node, ast.Constant) else None


ACCUMULATES = replace(imagined("h100-80gb", 8), accumulation="json")  # which imports
NO_ACCUMULATION = "--no-gradient-accumulation-fusion"
ENGINE = ("--transformer-impl=transformer_engine",)


@pytest.mark.parametrize(
    ("mode", "rest", "fused"),
    [
        ("bf16", {}, True),
        ("FA_linear_mxfp8", {}, True),
        ("FA_linear_mxfp8", {"gemms": "all"}, False),
        ("bf16", {"recipe": recipes.read("nvfp4")}, False),
        ("FA_linear_mxfp8", {"schedule": ("linear: mxfp8 until 0.9, then bf16",)}, False),
        ("source", {}, False),
        ("bf16", {"extra_flags": ENGINE}, True),
        ("FA_linear_mxfp8", {"extra_flags": ENGINE}, False),  # lost by its older releases
    ],
)
def test_apexs_kernel_adds_weight_gradients_whose_gemm_is_known_to_be_unquantized(
    mode, rest, fused
):
    config = resolve("llama32-1b", "wikipedia", mode, "standard", **rest)
    assert (NO_ACCUMULATION not in megatron_flags(config, ACCUMULATES, *NOWHERE)) == fused
    without = megatron_flags(config, imagined("h100-80gb", 8), *NOWHERE)
    assert NO_ACCUMULATION in without


def test_no_fusions_leaves_all_of_them_out():
    words = ["--model", "llama32-1b", "--dataset", "wikipedia", "--quantization", "bf16"]
    args = arguments.parser().parse_intermixed_args([*words, "--no-fusions"])
    found = megatron_flags(arguments.config_from(args, [], ACCUMULATES), ACCUMULATES, *NOWHERE)
    assert {NO_ACCUMULATION, "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"} <= set(found)
