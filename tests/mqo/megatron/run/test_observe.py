"""What a measured step leaves in TensorBoard, in metrics.jsonl and in dumps/."""

import json
import math
from argparse import Namespace

import pytest
import torch
from mqo.megatron.run.files import RunFiles
from mqo.megatron.run.guard import after_step, before_step
from mqo.megatron.run.observe import SCALARS
from mqo.megatron.run.record import recorded
from mqo.quant.backend import fake_quantize
from mqo.quant.config import current
from mqo.quant.gemms import gemm_operands
from mqo.quant.measurement import Measurement
from mqo.quant.record import RECORDER
from safetensors import safe_open
from torch.utils.tensorboard import SummaryWriter

TAG = "quant/fprop/unlabeled/x"


@pytest.fixture
def writer(tmp_path):
    made = SummaryWriter(tmp_path / "tensorboard")
    yield made
    made.close()


def step(iteration, *operands):
    """One training step that quantizes both operands of a GEMM, micro-batch by micro-batch."""
    before_step([], Namespace(curr_iteration=iteration - 1))
    for x in operands:
        q = gemm_operands("fprop", "mxfp8", None)
        q.lhs(x), q.rhs(x)
    after_step(iteration)


def rows(folder):
    return [json.loads(line) for line in RunFiles(folder).metrics.read_text().splitlines()]


def normal(seed):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def no_inspection(monkeypatch):
    monkeypatch.setattr("mqo.megatron.run.guard.inspect", lambda *facts: None)
    monkeypatch.setattr("mqo.megatron.run.guard.coverage_faults", lambda ranks: [])


def test_a_measured_step_writes_scalars_and_a_histogram(run, writer):
    folder = run(fprop="mxfp8")
    operands = [normal(1), normal(2)]
    with recorded(writer):
        step(1, *operands)
    found = {row["name"]: row for row in rows(folder) if row["name"].startswith(TAG)}
    assert set(found) == {*(f"{TAG}/{name}" for name in SCALARS), f"{TAG}/scale_exponent"}
    assert {row["iteration"] for row in found.values()} == {1}
    x = torch.cat(operands)
    q = fake_quantize(x, current().spec("mxfp8"))
    sqnr = 10 * math.log10(x.double().square().sum() / (x.double() - q).square().sum())
    assert found[f"{TAG}/sqnr_db"]["value"] == pytest.approx(sqnr, abs=1e-3)
    assert found[f"{TAG}/amax"]["value"] == x.abs().max().item()
    assert sum(found[f"{TAG}/scale_exponent"]["histogram"].values()) == 32


def test_the_noise_of_a_weight_gradient_is_written_if_the_run_asks(run, writer):
    names = {}
    for asks in ("true", "false"):
        folder = run(wgrad="mxfp4", record=f"every = 2\ngradient_noise = {asks}")
        with recorded(writer):
            for iteration in range(1, 4):
                before_step([], Namespace(curr_iteration=iteration - 1))
                q = gemm_operands("wgrad", "mxfp4", None)
                q.lhs(normal(1)), q.rhs(normal(2))
                after_step(iteration)
        ratios = [row for row in rows(folder) if row["name"].endswith("/noise_ratio")]
        names[asks] = [(row["name"], row["iteration"]) for row in ratios]
        assert all(1 < row["value"] < 20 for row in ratios)
        folder.joinpath("metrics.jsonl").unlink()
    name = "quant/wgrad/unlabeled/gradient/noise_ratio"
    assert names == {"true": [(name, 1), (name, 2)], "false": []}


def test_tensorboard_gets_them_too(run, writer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(fprop="mxfp8")
    with recorded(writer):
        step(1, normal(1))
    writer.flush()
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    tags = board.Reload().Tags()
    assert f"{TAG}/sqnr_db" in tags["scalars"]
    histogram = board.Histograms(f"{TAG}/scale_exponent")[0].histogram_value
    exponents = {
        right - 0.5: count
        for right, count in zip(histogram.bucket_limit, histogram.bucket, strict=True)
        if count
    }
    (row,) = [r for r in rows(tmp_path) if r["name"] == f"{TAG}/scale_exponent"]
    assert exponents == {float(e): n for e, n in row["histogram"].items()}


@pytest.mark.parametrize(("record", "expected"), [("every = 2", [1, 2, 4]), ("every = 0", [])])
def test_steps_between_leave_nothing(run, writer, record, expected):
    folder = run(fprop="mxfp8", record=record)
    with recorded(writer):
        for iteration in range(1, 5):
            step(iteration, normal(iteration))
        if not expected:
            writer.add_scalar("lm loss", 1.0, 1)
    names = f"{TAG}/amax"
    assert [row["iteration"] for row in rows(folder) if row["name"] == names] == expected


def up_to_one():
    """Ones, and a number that the format does not hold: the guard wants to see an effect."""
    x = torch.ones(4, 32)
    x[:, 0] = 0.3
    return x


def test_an_evaluation_between_steps_is_not_measured(run, writer):
    folder = run(fprop="mxfp8")
    with recorded(writer):
        for iteration in (1, 2):
            step(iteration, up_to_one())
            gemm_operands("fprop", "mxfp8", None).lhs(torch.full((4, 32), 9.0))
    assert {row["value"] for row in rows(folder) if row["name"] == f"{TAG}/amax"} == {1.0}


def test_ranks_are_merged(run, writer, other_rank):
    folder = run(fprop="mxfp8")

    @other_rank
    def reply(here):
        if isinstance(here, list) and here and isinstance(here[0], Measurement):
            return [Measurement(**here[1].__dict__ | {"amax": 7.0, "scales": {100: 5}})]
        return None

    with recorded(writer):
        step(1, up_to_one())
    found = {row["name"]: row for row in rows(folder)}
    assert found[f"{TAG}/amax"]["value"] == 7.0
    assert found[f"{TAG}/scale_exponent"]["histogram"] == {"-8": 4, "100": 5}


def test_a_rank_without_a_writer_measures_and_writes_nothing(run):
    folder = run(fprop="mxfp8")
    with recorded(None):
        step(1, normal(1))
    assert not RunFiles(folder).metrics.exists()
    assert {entry.measured for entry in RECORDER.entries()} == {1}


def test_without_a_run_folder_nothing_is_measured(run):
    step(1, normal(1))
    assert {entry.measured for entry in RECORDER.entries()} == {0}


def test_a_step_to_be_dumped_leaves_its_operands(run):
    folder = run(fprop="mxfp8", record="every = 0\ndump = [2]")
    with recorded(None):
        for iteration in (1, 2, 3):
            step(iteration, normal(iteration), normal(9))
    (path,) = RunFiles(folder).dumps.iterdir()
    assert path.name == "iteration_2_rank_0.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"iteration": "2", "rank": "0"}
        assert set(file.keys()) == {"fprop/unlabeled/x", "fprop/unlabeled/weight"}
        assert file.get_tensor("fprop/unlabeled/x").equal(normal(2))


def test_a_dumped_step_in_which_nothing_is_quantized_leaves_no_file(run):
    folder = run(record="dump = [1]")
    with recorded(None):
        step(1)
    assert not RunFiles(folder).dumps.exists()
