"""The programs that `mqo apply` adds to other trees: wheels of three releases, and checkouts.

MQO_CHECKOUTS=FOLDER[:FOLDER ...] adds clones of git work trees of Megatron-LM, whose HEAD the
series supports. Each tree trains a teacher and its student, then quantizes and exports the teacher.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.launch.config import resolve
from mqo.launch.source import DISTILLER, PROGRAM
from mqo.overlay.apply import apply, restore
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.overlay.vendor import Pin, release
from mqo.runs import KD_LOSS

pytest.importorskip("torch")
pytest.importorskip("modelopt")
from . import forking, real_runs
from .real_runs import SAVED_HALFWAY, losses
from .vendored_tree import PROJECT, git

pytestmark = pytest.mark.slow

VARIABLE = "MQO_CHECKOUTS"
CHECKOUTS = [Path(path) for path in os.environ.get(VARIABLE, "").split(":") if path]
# The last one is the release that is pinned, and 0.18 has a choice of each of its neighbors.
OTHERS = [pytest.param(name, marks=pytest.mark.heavy) for name in ("0.18.2", "0.19.2")]
TREES = ["0.17.1", *OTHERS, *(CHECKOUTS or [VARIABLE])]
PTQ = "examples/export/ptq_and_trtllm_export/text_generation_ptq.py"
HYBRID = "megatron/core/models/hybrid"
SERIES = Series.of_project(PROJECT)
FLAGS = tuple(f"{SAVED_HALFWAY} --train-samples 8 --save-interval 2".split())


@pytest.fixture(scope="module", params=TREES, ids=lambda tree: Path(tree).name)
def tree(request, tmp_path_factory):
    """A git work tree with the files of a release, patched."""
    if request.param == VARIABLE:
        pytest.skip(f"{VARIABLE} names no checkout of Megatron-LM")
    root = tmp_path_factory.mktemp("a tree") / "Megatron-LM"
    if isinstance(request.param, Path):
        source = f"file://{request.param}"
        subprocess.run(["git", "clone", "-q", "--depth=1", source, root], check=True)
        # The checkout's own program, which would train the teacher, needs CUDA in some releases.
        (root / PROGRAM).unlink()
    else:
        pin = Pin.load(PROJECT.upstream_pin)
        for path, content in release(pin, request.param, PROJECT.cache, print).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
    datasets = "megatron/core/datasets"
    for helper in (PROJECT.tree / datasets).glob("*.so"):  # for this Python
        shutil.copyfile(helper, root / datasets / helper.name)
    git(root, "init", "-q")
    (root / ".git/info/exclude").write_text("__pycache__/\n")
    git(root, "add", "--all", "--force")
    git(root, "commit", "-qm", "all", "--allow-empty")
    apply(Tree(root), SERIES)
    return root


@pytest.fixture(scope="module")
def pair(checkout_with, tmp_path_factory):
    """A function that trains a teacher and its student in a tree; None is the project's."""
    project = checkout_with(runs=tmp_path_factory.mktemp("runs"))

    def train(megatron):
        folder = tmp_path_factory.mktemp("teacher")
        common = {"megatron": megatron, "extra_flags": FLAGS}
        cells = (("bf16", {"checkpoint": folder}), ("FA_linear_mxfp4", {"teacher": folder}))
        runs = []
        for mode, more in cells:
            cell = resolve("llama32-1b", "wikipedia", mode, "smoke", **more, **common)
            runs.append(real_runs.run(project, cell))
        return folder, *runs

    return train


@pytest.fixture(scope="module")
def expected(pair):
    return pair(None)


def test_a_tree_trains_distills_quantizes_and_exports(tree, pair, expected, tmp_path):
    teacher, *runs = pair(tree)
    assert (runs[1].source / DISTILLER).is_file()
    for run, same in zip(runs, expected[1:], strict=True):
        assert losses(run)[0] == [(n, pytest.approx(x, rel=1e-6)) for n, x in losses(same)[0]]
    distilled = [run.read_metrics()[KD_LOSS] for run in (runs[1], expected[2])]
    assert distilled[0] == [(n, pytest.approx(x, rel=1e-6)) for n, x in distilled[1]]

    texts = tmp_path / "texts.txt"
    texts.write_text("One line of text to calibrate with.\n" * 50)

    def quantize(kind):
        words = f"--export-quant-cfg fp8 --calib-size 4 --calib-length 32 --export-format {kind}"
        folders = ["--load", teacher, "--save", tmp_path / kind, "--calib-dataset", texts]
        command = [sys.executable, tree / PTQ, *words.split(), *folders]
        command += ["--export-dir", tmp_path / f"{kind} exported"]
        return forking.run(command)

    hf, exported = quantize("hf"), tmp_path / "hf exported"
    if (tree / HYBRID).is_dir():
        assert hf.returncode == 0, hf.stderr
        assert any(exported.glob("*.safetensors"))
        return
    assert hf.returncode == 2
    assert HYBRID.replace("/", ".") in hf.stderr
    assert not exported.exists()
    quantized = quantize("tensorrt_llm")
    assert quantized.returncode == 0, quantized.stderr
    assert (tmp_path / "tensorrt_llm exported/config.json").is_file()


def test_restoring_takes_the_programs_away(tree):
    changed = git(tree, "status", "--porcelain")
    assert DISTILLER in changed
    restore(Tree(tree), SERIES)
    assert git(tree, "status", "--porcelain") == ""
    assert not (tree / DISTILLER).exists()
