"""The simulation against the same program on real tensors, in real processes."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from mqo.launch import coverage
from mqo.launch.config import resolve
from mqo.launch.machine import Machine
from mqo.launch.program_cache import source_of
from mqo.overlay.series import Series
from mqo.process import temporary_folder
from mqo.program import call
from mqo.recipes import recipe as recipes
from mqo.simulate.facts import RankFacts
from mqo.simulate.jobs import PROGRAM, RunJob

from ...real_runs import transformed_recipe

GPU = Machine(1, 8)
ALIGNMENT = 512
# One rank's flags; the last ones count, and real processes talk by gloo.
BASE = ("--global-batch-size", "16", "--micro-batch-size", "2", "--distributed-backend", "gloo")
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100000"
EXPERTS = "--expert-model-parallel-size 2"
REDUCES = "param_and_grad_buffer.py"
TEACHER = """\
num_layers: 4
hidden_size: 128
ffn_hidden_size: 256
num_attention_heads: 4
num_query_groups: 2
"""


def tiny(model, mode, flags="", **rest):
    extra = (*BASE, *flags.split())
    return resolve(model, "wikipedia", mode, "tiny", dtype="bf16", extra_flags=extra, **rest)


@pytest.fixture(scope="module")
def simulated(vendored, checkout_with):
    """A function that runs a configuration's program on all ranks, on fake tensors or real ones.

    Each once, though several tests ask for it.
    """
    project = checkout_with()
    pool, done = ThreadPoolExecutor(2), {}

    def once(config, world, steps, real):
        key = (config.model_dump_json(), world, *steps, real)
        if key not in done:
            done[key] = run(config, world, steps, real)
        return done[key]

    def run(config, world, steps, real):
        job = RunJob.from_config(config, GPU, dict(config.quantization.types), 1.0)
        series = Series.of_project(project)
        with (
            source_of(project, vendored, series, config, PROGRAM) as source,
            temporary_folder("simulated") as folder,
        ):
            (folder / "quant.toml").write_text(job.options)
            program = source.path / PROGRAM
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]

            def one(rank):
                told = {"world": world, "rank": rank, "per_node": 1, "real": real}
                told |= {"flags": list(job.flags), "micro_batches": steps}
                variables = {
                    **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
                    **{"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world)},
                    "MQO_QUANT_CONFIG": str(folder / "quant.toml"),
                }
                request = {"job": told}
                return RankFacts(**call(program, "simulate", request, variables=variables))

            return list(pool.map(one, range(world)))

    yield once
    pool.shutdown()


def flops(facts):
    return [sum(w.flops * calls for w, calls in step.works.items()) for step in facts.steps]


def products(facts):
    """{(layer, GEMM, type, shape): calls} of the last step."""
    rows = facts.steps[-1].works.items()
    return {(w.layer, w.gemm, w.quant_type, w.shape): n for w, n in rows if w.flops}


@pytest.mark.parametrize(
    "mode", ["FA_linear_mxfp8", pytest.param("qk_pv_mxfp8", marks=pytest.mark.heavy)]
)
def test_one_rank_has_the_bytes_and_the_products_of_real_tensors(simulated, mode):
    config = tiny("llama32-1b", mode, OVERLAPPED)
    (fake,), (real,) = (simulated(config, 1, [1, 1, 2], real) for real in (False, True))
    assert fake.step_peaks == real.step_peaks
    # Upstream makes some tensors of one number before it builds the model.
    assert fake.setup_peak == pytest.approx(real.setup_peak, abs=8 * ALIGNMENT)
    assert fake.kinds == real.kinds
    assert products(fake) == products(real)
    assert flops(fake) == flops(real) != [0, 0]


BACKWARD = ("qk_recompute", "dv", "dp", "dq", "dk")


@pytest.mark.parametrize(
    ("mode", "sites"),
    [
        pytest.param("qk_pv_mxfp8", ("qk", "pv", *BACKWARD), marks=pytest.mark.heavy),
        pytest.param("pv_nvfp4", ("pv", "dv", "dp"), marks=pytest.mark.slow),
        ("transformed", ("qk", "pv", *BACKWARD)),
    ],
)
def test_types_in_attentions_backward_pass_are_those_of_real_tensors_and_of_the_coverage(
    simulated, vendored, checkout_with, tmp_path, mode, sites
):
    own = {"attention_gemms": "all"}
    if mode == "transformed":
        mode, own = "bf16", {"recipe": recipes.read(transformed_recipe(tmp_path))}
    config = tiny("llama32-1b", mode, OVERLAPPED, **own)
    (fake,), (real,) = (simulated(config, 1, [1, 1], real) for real in (False, True))
    assert fake.step_peaks == real.step_peaks
    assert fake.kinds == real.kinds
    assert products(fake) == products(real)
    project = checkout_with(cache=tmp_path)
    known = coverage.of_config(project, vendored, Series.of_project(project), config)
    # One chunk: as in the coverage, the products have the scores of hidden keys.
    works = fake.steps[-1].works.items()
    ours = by_site((work, work.flops * calls) for work, calls in works)
    assert ours.keys() == {*sites}
    assert ours == by_site((row, row.flops) for row in known.products)


def by_site(rows):
    """{site: FLOPs} of attention's products with a type."""
    flops = {}
    for row, count in rows:
        if row.quant_type not in (None, "none") and row.gemm not in ("fprop", "dgrad", "wgrad"):
            flops[row.gemm] = flops.get(row.gemm, 0) + count
    return flops


PIPELINED = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("model", "flags", "world"),
    [
        ("llama32-1b", OVERLAPPED, 1),
        pytest.param("deepseek2_lite", OVERLAPPED, 1, marks=pytest.mark.slow),
        pytest.param("llama32-1b", PIPELINED, 2, marks=pytest.mark.slow),
    ],
    ids=["llama32-1b", "deepseek2_lite", "PP2"],
)
def test_a_hybrid_model_of_a_gpts_layers_has_its_bytes_products_and_exchanges(
    simulated, model, flags, world
):
    classes = ("gpt", "hybrid")
    configs = [tiny(model, "FA_linear_mxfp8", flags, model_class=name) for name in classes]
    ranks = [simulated(config, world, [1, 1, 2], real=False) for config in configs]
    for gpt, hybrid in zip(*ranks, strict=True):
        assert hybrid.step_peaks == gpt.step_peaks
        assert hybrid.kinds == gpt.kinds
        assert hybrid.steps[-1].exchanges == gpt.steps[-1].exchanges
        assert unnamed(hybrid) == unnamed(gpt)


def unnamed(facts):
    """The products without the numbers of layers, and their calls."""
    names = {}
    for (layer, *kind), calls in products(facts).items():
        key = (re.sub(r"\.\d+\.", ".N.", layer), *kind)
        names[key] = names.get(key, 0) + calls
    return names


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("", marks=pytest.mark.heavy),
        pytest.param("--moe-grouped-gemm", marks=pytest.mark.slow),
    ],
)
def test_experts_of_one_rank_differ_by_a_scalar(simulated, flag):
    config = tiny("deepseek2_lite", "linear_mxfp8", flag)
    (fake,), (real,) = (simulated(config, 1, [1, 1, 2], real) for real in (False, True))
    # The factor of the balancing loss, a tensor of one number.
    assert [b - a for a, b in zip(fake.step_peaks, real.step_peaks, strict=True)] == [ALIGNMENT] * 3
    assert products(fake) == products(real)


@pytest.fixture
def student(tmp_path):
    """A function that returns a model that learns from a larger one, of which sizes are known."""
    (tmp_path / "model_config.yaml").write_text(TEACHER)

    def configured(flags):
        return tiny("llama32-1b", "linear_mxfp8", f"--export-kd-teacher-load {tmp_path} {flags}")

    return configured


@pytest.mark.slow
def test_a_student_and_its_teacher_have_the_bytes_and_the_products_of_real_tensors(
    simulated, student, tmp_path
):
    """In two passes; two_ranks_of_a_distillation below have one."""
    (tmp_path / "kd.yaml").write_text("skip_lm_loss: false")
    flags = f"--export-kd-cfg {tmp_path / 'kd.yaml'}"
    (fake,), (real,) = (simulated(student(flags), 1, [1, 3], real) for real in (False, True))
    assert fake.step_peaks == real.step_peaks
    assert products(fake) == products(real)
    layers = {layer for layer, *_ in products(fake)}
    assert {"output_layer", "_teacher_model.output_layer"} <= layers


def check_peaks(fake, real):
    """Compare peaks, except for gloo's copies of the gradients that it reduces.

    How many copies live at a time depends on when the exchanges end.
    """
    copies = [row.bytes for row in real.at_peak if row.kind == "temporary" and REDUCES in row.line]
    assert fake.peak < 1.05 * real.peak
    assert real.peak - sum(copies) < 1.05 * fake.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    ["--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"],
)
def test_two_ranks_of_a_distillation_are_as_real_ones(simulated, student, flags):
    fakes, reals = (simulated(student(flags), 2, [1, 2], real) for real in (False, True))
    for fake, real in zip(fakes, reals, strict=True):
        assert fake.steps[-1].exchanges == real.steps[-1].exchanges != {}
        assert products(fake) == products(real)
        check_peaks(fake, real)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags", "steps"),
    [
        ("llama32-1b", f"--tensor-model-parallel-size 2 --sequence-parallel {SHARDED}", [1, 2]),
        ("llama32-1b", "--pipeline-model-parallel-size 2", [1, 2, 3]),
        ("llama32-1b", OVERLAPPED, [1, 2]),
        ("llama32-1b", "--context-parallel-size 2", [1, 2]),
        ("deepseek2_lite", f"{EXPERTS} --moe-token-dispatcher-type alltoall {SHARDED}", [1, 2]),
        ("deepseek2_lite", EXPERTS, [1, 2]),
    ],
    ids=["TP2", "PP2", "DP2", "CP2", "EP2", "EP2 by all-gather"],
)
def test_two_ranks_exchange_what_real_processes_do(simulated, model, flags, steps):
    config = tiny(model, "bf16", flags)
    fakes, reals = (simulated(config, 2, steps, real) for real in (False, True))
    for fake, real in zip(fakes, reals, strict=True):
        assert fake.steps[-1].exchanges == real.steps[-1].exchanges != {}
        assert products(fake) == products(real)
        check_peaks(fake, real)


@pytest.mark.parametrize(
    ("model", "mode", "pattern"),
    [("llama32-1b", "mxfp8", "-**-*--"), ("deepseek2_lite", "mxfp8", None)],
)
def test_products_are_those_of_the_coverage(
    simulated, vendored, checkout_with, tmp_path, model, mode, pattern
):
    layers = f" --hybrid-layer-pattern {pattern}" if pattern else ""
    config = tiny(model, mode, f"--attention-backend unfused{layers}")
    project = checkout_with(cache=tmp_path)
    known = coverage.of_config(project, vendored, Series.of_project(project), config)
    (found,) = simulated(config, 1, [1, 1], real=False)
    assert flops(found)[-1] == known.flops
    quantized = {row.quant_type for row in known.products} - {None, "none"}
    assert quantized

    def share(rows):
        return sum(flops for kind, flops in rows if kind in quantized)

    ours = [(w.quant_type, w.flops * n) for w, n in found.steps[-1].works.items()]
    assert share(ours) == share((row.quant_type, row.flops) for row in known.products)
