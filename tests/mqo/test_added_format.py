"""A format and its element more in formats.toml, in a copy: every part of it knows them."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.project import Project
from mqo.quant import formats

from ..vendored_tree import copy_checkout

pytestmark = pytest.mark.slow

HERE = Project.here()
NAME = "mxfp7_e3m3"
LIGHT, DARK = "#33691f", "#a5d67b"
ELEMENT = "e3m3 = { bits = 7, mantissa_bits = 3 }\n"
ROW = f"""
[formats.{NAME}]
element = "e3m3"
scale = "e8m0"
block = 32
source = "nobody's: MX with seven bits"
color = "moss"
light = "{LIGHT}"
dark = "{DARK}"
"""
FORMATS = tuple(formats.FORMATS)
TRAIN = "from mqo.commands.train_config import main; main()"


@pytest.fixture(scope="module")
def project(vendored, tmp_path_factory):
    """A copy of the checkout that differs in the two rows alone."""
    root = tmp_path_factory.mktemp("a copy")
    copy_checkout(vendored, root)
    file = root / "tools/mqo/quant/formats.toml"
    head, elements, rest = file.read_text(encoding="utf-8").partition("[elements]\n")
    file.write_text(head + elements + ELEMENT + rest + ROW, encoding="utf-8")
    return root


@pytest.fixture
def run(project, tmp_path):
    """A function that runs Python in an empty folder, with the copy's packages; what it prints."""
    places = f"{project / 'tools'}:{project / 'Megatron-LM'}"
    cache = {"MQO_KERNEL_CACHE": str(HERE.cache / "kernels")}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env=os.environ | cache | {"PYTHONPATH": places},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_the_modifier_sets_and_shows_it(run, project):
    script = project / "script/quant_type_modifier.py"
    types = ", ".join(("none", *FORMATS, NAME, *formats.FAMILIES))
    assert f"T is one of {types}, or your own format." in " ".join(run(script, "-h").split())
    run(script, "--linear-quant", NAME, "--qk-quant", NAME)
    sites = json.loads(run(script, "--check", "--json"))["sites"]
    types = {site["site"]: site["type"] for site in sites}
    run(script, "--restore")
    assert types == dict.fromkeys(formats.SITES, "none") | {"fprop": NAME, "qk": NAME}


def test_the_launcher_has_its_modes_and_plans_them_at_real_size(run):
    names = ("--model", "llama31-8b", "--dataset", "wikipedia")
    gpus = ("--device", "h100-80gb", "--save-activations", "packed", "--dry-run")
    plan, other = (run("-c", TRAIN, *names, "--quantization", m, *gpus) for m in (NAME, "mxfp8"))
    assert f"# source: fprop = {NAME}\n" in plan
    # The layout of a type that takes as much memory.
    assert "--tensor-model-parallel-size" in plan
    assert plan.replace(NAME, "mxfp8") == other


def test_coverage_shows_the_products_that_it_quantizes(run):
    choice = ("--model", "llama32-1b", "--mode", f"FA_linear_{NAME}", "--training-config", "tiny")
    found = json.loads(run("-m", "mqo", "coverage", *choice, "--json"))
    types = {(p["gemm"], p["quant_type"]) for p in found["products"] if not p["reason"]}
    assert types == {("fprop", NAME), ("qk", NAME)}


def test_the_report_and_the_plot_have_its_color(run, tmp_path):
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    made_up = Path(__file__).with_name("report") / "conftest.py"
    program = f"""
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("made_up", {str(made_up)!r})
made_up = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made_up)
for mode in ("bf16", "FA_linear_{NAME}"):
    made_up.make_run(pathlib.Path("runs", mode), mode)
"""
    run("-c", program)
    run("-m", "mqo", "report", "runs", "--out", "report")
    page = next((tmp_path / "report").glob("*.html")).read_text(encoding="utf-8")
    assert NAME in page
    assert LIGHT in page
    assert DARK in page
    run("-m", "mqo", "plot", f"runs/FA_linear_{NAME}", "--out", "loss.svg")
    assert LIGHT in (tmp_path / "loss.svg").read_text(encoding="utf-8")


# -- arithmetic -----------------------------------------------------------------------------------

# The magnitudes of E3M3, smallest first, as MX v1.0 would define them: one's place is its code.
GRID = [m / 32 for m in range(8)]
GRID += [(1 + m / 8) * 2.0**e for e, m in itertools.product(range(-2, 5), range(8))]

QUANTIZE = f"""
import json, sys
import torch
from mqo.quant import QuantSpec, cpu, pack, fake_quantize, reference
x = torch.tensor(json.loads(sys.argv[1]))
spec = QuantSpec("{NAME}")
ours = {{
    "reference": reference.qdq(x, spec),
    "the kernel": cpu.qdq(x, spec),
    "the other axis": fake_quantize(x.T.contiguous(), spec, axis=0).T,
    "bfloat16": fake_quantize(x.bfloat16(), spec).float(),
    "packed": pack(x, spec).unpack(),
}}
print(json.dumps({{name: q.tolist() for name, q in ours.items()}}))
print(pack(x, spec).nbytes)
"""


def nearest(value):
    """The magnitude of the grid that is nearest, of two the one with the even code."""
    return min(enumerate(GRID), key=lambda place: (abs(value - place[1]), place[0] % 2))[1]


def quantized(block):
    """A block as MX v1.0 has it, section 6.3: the scale follows from the largest exponent."""
    scale = 2.0 ** (math.frexp(max(map(abs, block)))[1] - 1 - 4)
    return [nearest(abs(x) / scale) * scale * (-1 if x < 0 else 1) for x in block]


def test_its_arithmetic_is_that_of_its_row(run):
    """Values with few bits, so that bfloat16 holds them: many are ties, some saturate."""
    rows = [
        [((37 * i + 11 * row) % 255 - 127) / 8 * 2.0 ** (row - 4) for i in range(64)]
        for row in range(8)
    ]
    expected = [quantized(row[:32]) + quantized(row[32:]) for row in rows]
    text, nbytes = run("-c", QUANTIZE, json.dumps(rows)).splitlines()
    for name, found in json.loads(text).items():
        assert found == expected, name
    assert int(nbytes) == 8 * (64 + 2)
    flat = [value for row in expected for value in row]
    assert expected != rows
    assert len({abs(value) for value in flat}) > 32
