"""Each rank's weights, against upstream's own model on the meta device at the same sizes."""

import json
import sys
from pathlib import Path

import pytest
from mqo.launch.config import resolve
from mqo.launch.flags import DTYPES, platform_flags, shape_flags
from mqo.launch.machine import Machine
from mqo.matrix import tables
from mqo.scale.layout import Layout
from mqo.scale.weights import padded_vocabulary, rank_weights

from ... import forking

PROGRAM = Path(__file__).with_name("rank_weights.py")
# Model, layout, a rank, and its stage: each size that a plan may have.
RANKS = [
    ("llama32-1b", Layout(8), 0, 0),
    ("llama32-1b", Layout(8, pipeline=2), 7, 1),
    ("llama31-8b", Layout(8, tensor=2), 1, 0),
    ("llama31-8b", Layout(64, tensor=4, pipeline=4), 0, 0),
    ("llama31-8b", Layout(64, tensor=4, pipeline=4), 63, 3),
    ("deepseek2_lite", Layout(8, expert=8), 5, 0),
    ("deepseek2_lite", Layout(64, expert=4), 63, 0),
    ("own", Layout(1), 0, 0),
    ("own", Layout(8, tensor=2, pipeline=2), 7, 1),
    ("experts", Layout(8, tensor=2, expert=2), 5, 0),
    ("mamba", Layout(1), 0, 0),
    ("mamba", Layout(8, tensor=2, pipeline=2), 7, 1),
    ("nemotron-h-8b", Layout(8, tensor=8), 3, 0),
    ("nemotron-h-8b", Layout(8, tensor=2, pipeline=4), 7, 3),
    ("squared", Layout(8, tensor=2, expert=2), 5, 0),
    # HybridModels: of the layers of a GPT, and of other layers in unequal stages.
    ("llama32-1b hybrid", Layout(8, pipeline=2), 7, 1),
    ("deepseek2_lite hybrid", Layout(8, expert=8), 5, 0),
    ("dense pattern", Layout(8, tensor=2, pipeline=2), 0, 0),
    ("dense pattern", Layout(8, tensor=2, pipeline=2), 7, 1),
    ("sparse pattern", Layout(8, tensor=2, expert=2), 5, 0),
]
HYBRID = " hybrid"
# Own norms of queries and keys, biases, and heads that are wider than the layer.
OWN = """
num_layers = 4
hidden_size = 512
ffn_hidden_size = 1024
num_attention_heads = 8
num_query_groups = 4
head_dim = 96
qk_norm = true
qkv_bias = true
vocab_size = 1024
tied_embeddings = false
norm_epsilon = 1e-6
rotary_base = 10000
train_sequence = 128
"""


PATTERNS = {"dense pattern": "-**-*|--*", "sparse pattern": "*EE-**E"}


def meta_job(of, layout, rank):
    """What rank_weights.py takes to build that rank's part of a model."""
    shape = shape_flags(of, layout.flags(of.dtype))
    flags = ["--vocab-size", str(of.model.vocab_size), *shape]
    flags += [*platform_flags(Machine(1, layout.gpus)), *DTYPES[of.dtype]]
    return {"world": layout.gpus, "rank": rank, "flags": flags}


EXPERTS = (
    OWN.replace("qkv_bias = true", "")
    + """
[moe]
dense_layers = 1
num_experts = 8
topk = 2
shared_experts = 0
expert_ffn_size = 256
aux_loss = 0.001
renormalized = true
"""
)

MAMBA = (
    OWN.replace("num_layers = 4", 'pattern = "M-MM*-"')
    + """
[mamba]
num_heads = 16
head_dim = 64
num_groups = 2
state_dim = 32
"""
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{name: the argument of --model}, also of own models."""
    texts = {"own": OWN, "experts": EXPERTS, "mamba": MAMBA}
    texts["squared"] = f'activation = "squared_relu"{EXPERTS}'
    for name, pattern in PATTERNS.items():
        text = EXPERTS if "E" in pattern else OWN
        texts[name] = text.replace("num_layers = 4", f'pattern = "{pattern}"')
    own = {}
    for name, text in texts.items():
        own[name] = str(tmp_path_factory.mktemp("models") / f"{name.replace(' ', '_')}.toml")
        Path(own[name]).write_text(text)
    return {name: name for name in tables.models()} | own


@pytest.fixture(scope="module")
def experiments(paths):
    """{name: the experiment of the model}; a name can end in the class of the model."""
    words = ("wikipedia", "bf16", "standard")
    return {
        name: resolve(
            paths[name.removesuffix(HYBRID)],
            *words,
            model_class="hybrid" if name.endswith(HYBRID) else None,
        ).experiment
        for name, *_ in RANKS
    }


@pytest.fixture(scope="module")
def built(vendored, experiments, tmp_path_factory):
    """{model, layout, rank: upstream's counts}, all of them by one process."""
    pytest.importorskip("torch")
    jobs = [meta_job(experiments[name], layout, rank) for name, layout, rank, _ in RANKS]
    file = tmp_path_factory.mktemp("jobs") / "jobs.json"
    file.write_text(json.dumps(jobs))
    done = forking.run([sys.executable, "-I", "-W", "ignore", PROGRAM, vendored.root, file])
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    return {one[:3]: row for one, row in zip(RANKS, rows, strict=True)}


@pytest.mark.parametrize(("name", "layout", "rank", "stage"), RANKS)
def test_a_rank_holds_the_weights_that_upstream_gives_it(
    built, experiments, name, layout, rank, stage
):
    found = rank_weights(experiments[name].model, layout, stage)
    counts = built[name, layout, rank]
    assert (found.dense, found.expert) == (counts["dense"], counts["expert"])


def test_one_rank_holds_the_published_total():
    for model in tables.models().values():
        found = rank_weights(model, Layout(1), 0)
        assert found.dense + found.expert == model.parameters


def test_a_vocabulary_is_padded_for_its_ranks():
    model = tables.models()["llama31-8b"]
    rows = [padded_vocabulary(model, Layout(8, tensor=size)) for size in (1, 2, 4)]
    assert rows == [128256, 128256, 128512]
