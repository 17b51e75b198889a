"""A model that ModelOpt has quantized, trained on: real runs, in one process and in two."""

import json
import os
import re
import shutil
import sys

import pytest
from mqo.errors import CheckpointError, RunError
from mqo.launch import convert, evaluation
from mqo.launch.config import Cluster, resolve
from mqo.launch.forward_pass import SavedModel
from mqo.launch.run import Result
from mqo.report.collect import collect
from mqo.run_records import parsed
from mqo.runs import TRAIN_LOSS

pytest.importorskip("torch")
pytest.importorskip("modelopt")
import torch

from . import forking, real_runs
from .real_runs import LAST, SAVED, SAVED_HALFWAY, SHORT_STEPS, tracked
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow


PROGRAM = PROJECT.tree / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py"
SIZES = f"{SAVED_HALFWAY} {SHORT_STEPS} --eval-iters 0".split()
SEQUENCE = ["--seq-length", "64", "--max-position-embeddings", "64"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def cell(mode="bf16", flags=(), processes=1, **rest):
    return resolve(
        *("llama32-1b", "wikipedia", mode, "smoke"),
        extra_flags=(*SIZES, *SEQUENCE, *flags),
        cluster=Cluster(nproc_per_node=processes),
        **rest,
    )


def program(*words):
    command = [sys.executable, "-W", "ignore", PROGRAM, *words, "--out-seq-length", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forking.run(command, env=env)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def project(checkout_with, tmp_path_factory):
    return checkout_with(runs=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def plain(project):
    """A run that was trained without any quantizer."""
    return real_runs.run(project, cell())


@pytest.fixture(scope="module")
def quantized(plain, tmp_path_factory):
    """The checkpoints of that model in FP8, with a scale of each input."""
    folder = tmp_path_factory.mktemp("quantized") / "saved"
    calibration = ["--calib-size", 8, "--calib-length", 32]
    program("--load", plain.root, "--save", folder, "--export-quant-cfg", "fp8", *calibration)
    return folder


@pytest.fixture(scope="module")
def trained(project, quantized, tmp_path_factory):
    """A run that went on from there, and the folder that it saved to."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--pretrained-checkpoint", str(quantized)]
    run = real_runs.run(project, cell(flags=flags, checkpoint=folder), coverage=True)
    return run, folder


@pytest.fixture
def halfway(trained, tmp_path):
    """What that folder was after the third step."""
    folder = shutil.copytree(trained[1], tmp_path / "halfway")
    shutil.rmtree(folder / f"iter_{LAST:07d}")
    (folder / convert.TRACKER).write_text(str(SAVED))
    return folder


def later(run):
    """The training losses behind the third step."""
    return [loss for step, loss in run.read_metrics()[TRAIN_LOSS] if step > SAVED]


def tensors(checkpoint, ending):
    """{name: tensor} of a checkpoint's tensors whose names end so."""
    from torch.distributed import checkpoint as dcp

    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {n: torch.empty(facts.size) for n, facts in entries.items() if n.endswith(ending)}
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


def test_each_checkpoint_has_the_quantizers_and_only_they_stay(plain, quantized, trained):
    run, folder = trained
    first = run.read_metrics()[TRAIN_LOSS][0][1]
    # It begins where the plain model ended, but for the quantization.
    assert first != plain.read_metrics()[TRAIN_LOSS][-1][1]
    assert first == pytest.approx(plain.read_metrics()[TRAIN_LOSS][-1][1], abs=0.2)
    for iteration in (SAVED, LAST):
        assert (folder / f"iter_{iteration:07d}/modelopt_state").is_dir()
    places = (quantized / "iter_0000001", folder / f"iter_{LAST:07d}")
    for ending, stays in (("_amax", True), ("linear_proj.weight", False)):
        before, after = (tensors(place, ending) for place in places)
        assert before and before.keys() <= after.keys()
        assert all(torch.equal(before[name], after[name]) is stays for name in before)


def test_the_run_is_recorded_as_quantized_and_is_no_baseline(plain, trained):
    run = trained[0]
    assert parsed(run.result, Result).types["ModelOpt"] == "fp8"
    covered = {
        re.sub(r"\.\d+\.", ".", product["layer"])
        for product in json.loads(run.coverage.read_text())["products"]
        if product["quant_type"] == "fp8" and not product["reason"]
    }
    saved = tensors(trained[1] / f"iter_{LAST:07d}", "_quantizer._amax")
    assert covered == {re.sub(r"\.\d+\.", ".", name).rsplit(".", 2)[0] for name in saved}
    labels = {one.variant: one.label for one in collect([plain.root, run.root])[0]}
    assert labels == {
        "bf16": "bf16 (unquantized)",
        "fp8 by ModelOpt": "fp8 by ModelOpt",
    }


def test_a_run_goes_on_bit_equal(project, trained, halfway):
    flags = ["--pretrained-checkpoint", str(halfway / "not there")]
    run = real_runs.run(project, cell(flags=flags, checkpoint=halfway))
    assert later(run) == later(trained[0])
    assert tracked(halfway) == LAST


def test_a_run_goes_on_over_two_tensor_ranks(project, trained, halfway):
    run = real_runs.run(project, cell(flags=TENSOR, processes=2, checkpoint=halfway))
    assert later(run) == pytest.approx(later(trained[0]), rel=1e-4)
    assert (halfway / f"iter_{LAST:07d}/modelopt_state").is_dir()


def test_types_in_the_source_are_refused_beside_it(project, quantized):
    flags = ["--pretrained-checkpoint", str(quantized)]
    with pytest.raises(RunError, match=r"ModelOpt quantizes 8 layers.*fprop as mxfp8"):
        real_runs.run(project, cell("linear_mxfp8", flags))


def test_a_teacher_teaches_it(project, plain, quantized, tmp_path):
    # Others may write no hashes.
    unhashed = shutil.copytree(quantized, tmp_path / "elsewhere")
    (unhashed / "iter_0000001/integrity.json").unlink()
    flags = ["--pretrained-checkpoint", str(unhashed)]
    run = real_runs.run(project, cell(flags=flags, teacher=plain.root))
    losses = [loss for _, loss in run.read_metrics()["kd loss"]]
    # The teacher is what the student was before it was quantized.
    assert 0 < losses[0] < 0.1
    checkpoint = run.checkpoints / f"iter_{LAST:07d}"
    assert (checkpoint / "modelopt_state").is_dir()
    quantizers = tensors(checkpoint, "_amax")
    assert quantizers and not [name for name in quantizers if "teacher" in name]


def test_it_is_evaluated_and_exported_as_the_format_it_has(
    vendored, plain, quantized, trained, tmp_path
):
    run, folder = trained
    places = [SavedModel.find(place) for place in (plain.root, quantized, run.root)]
    before, loss, after = evaluation.evaluate(
        vendored, places, ["bf16"], evaluation.text(tokens=256)
    )
    assert before.text == loss.text == after.text  # all were trained on the same
    assert loss.loss == pytest.approx(before.loss, abs=0.2) and loss.loss != before.loss
    assert [one.modelopt for one in (before, loss, after)] == [None, "fp8", "fp8"]
    assert after.iteration == LAST and 0 < after.loss < 9
    with pytest.raises(CheckpointError, match="ModelOpt quantizes 8 layers"):
        evaluation.evaluate(
            vendored, [SavedModel.find(folder)], ["linear_mxfp8"], evaluation.text(tokens=256)
        )
    words = ["--export-dir", tmp_path / "out", "--export-format", "hf"]
    program("--load", folder, *words, "--tokenizer-model", PROJECT.data / "wikipedia/tokenizer")
    assert '"FP8"' in (tmp_path / "out/hf_quant_config.json").read_text()
