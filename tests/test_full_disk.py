"""Every command that writes, on a disk that is full: one sentence, an exit code, nothing left."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from mqo import cli
from mqo.launch import convert
from mqo.launch.config import resolve
from mqo.launch.export import export
from mqo.runs import RunFolder

pytest.importorskip("torch")
pytest.importorskip("modelopt")
from . import forking, real_runs
from .real_runs import TINY
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow

SIZE = 8 << 20  # of the disk, in bytes
FREE = (0, 48 << 10)  # what is left of it
FILL = "fill"
MQO = [sys.executable, "-m", "mqo"]
TRAIN = [*MQO, "train", "--model", "llama32-1b"]
TRAIN += ["--dataset", "wikipedia", "--quantization", "bf16", "--training-config", "tiny"]
MODIFIER = [sys.executable, PROJECT.root / "script/quant_type_modifier.py"]
PTQ = [
    sys.executable,
    PROJECT.tree / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py",
]
PTQ += ["--calib-size", "4", "--calib-length", "32", "--export-quant-cfg", "fp8"]
SCRIPT = PROJECT.root / "script/llama32-1b/pretrain_llama32-1b_wikipedia_FA_linear_mxfp8.sh"
SWEEP = ["--models", "llama32-1b", "--datasets", "wikipedia", "--modes", "bf16"]
PERF = ["--model", "llama32-1b", "--mode", "FA_mxfp8", "--training-config", "tiny", "--no-scaling"]

# By the command, and what is written: from what a run left (`have`) into the disk (`at`).
WRITES = {
    "plot, png": lambda have, at: [*MQO, "plot", have.run, "-o", at / "a.png"],
    "plot, svg": lambda have, at: [*MQO, "plot", have.run, "-o", at / "a.svg"],
    "plot, pdf": lambda have, at: [*MQO, "plot", have.run, "-o", at / "a.pdf"],
    "plot, operands": lambda have, at: [*MQO, "plot", "--operands", have.run, "-o", at / "a.png"],
    "sensitivity": lambda have, at: [
        *(*MQO, "sensitivity", have.run, "--mode", "mxfp4", "--tokens", "256"),
        *("--rules", "60%", "-o", at / "a.png"),
    ],
    "report": lambda have, at: [*MQO, "report", have.run, "-o", at / "report"],
    "report, latex": lambda have, at: [*MQO, "report", have.run, "--latex", "-o", at / "report"],
    "simulate": lambda have, at: [
        *MQO,
        "simulate",
        SCRIPT,
        "--device",
        "h200",
        "-o",
        at / "a.html",
    ],
    "snapshot": lambda have, at: [*MQO, "snapshot", at / "source"],
    "diff": lambda have, at: [*MQO, "diff", "--export", at / "patches"],
    "matrix": lambda have, at: [*MQO, "matrix", "generate", "--types", "nvfp4", "-o", at / "made"],
    "convert, from hf": lambda have, at: [*MQO, "convert", "hf-to-megatron", have.hf, at / "made"],
    "convert, to hf": lambda have, at: [*MQO, "convert", "megatron-to-hf", have.run, at / "made"],
    "export": lambda have, at: [*MQO, "export", "--format", "mxfp8", have.run, at / "made"],
    "dequantize.py": lambda have, at: [
        *(sys.executable, have.packed / "dequantize.py", have.packed, at / "made")
    ],
    "PTQ, checkpoint": lambda have, at: [*PTQ, "--load", have.hf, "--save", at / "made"],
    "PTQ, export": lambda have, at: [
        *(*PTQ, "--load", have.hf, "--export-dir", at / "made", "--export-format", "hf")
    ],
    "data": lambda have, at: [
        *(*MQO, "data", "prepare", "text", "--input", have.text, "--output", at / "made"),
        *("--tokenizer", PROJECT.data / "wikipedia/tokenizer", "--workers", "1"),
    ],
}
# What these leave is a run's record, or is continued by the same command.
TRAINS = {
    "train, run folder": lambda have, at: [*TRAIN, "--runs", at / "runs"],
    "train, CHECKPOINT": lambda have, at: [*TRAIN, "--runs", have.root / "runs", at / "saved"],
    "sweep": lambda have, at: [*MQO, "sweep", *SWEEP, "-o", at / "sweep"],
    "perf": lambda have, at: [*MQO, "perf", *PERF, "-o", at / "perf"],
}
# To standard output alone.
PRINTS = {
    "status": [*MQO, "status"],
    "diff": [*MQO, "diff", "quant_sites"],
    "doctor": [*MQO, "doctor"],
    "recipe": [*MQO, "recipe", "show", "nvfp4"],
    "formats": [*MQO, "formats"],
    "recipe, JSON": [*MQO, "recipe", "list", "--json"],
    "matrix": [*MQO, "matrix", "list"],
    "coverage": [*MQO, "coverage", "--model", "llama32-1b", "--mode", "mxfp8"],
    "an error as JSON": [*MQO, "recipe", "show", "nonsense", "--json"],
    "train, list": [*TRAIN, "--list"],
    "train, dry run": [*TRAIN, "--dry-run"],
    "modifier, check": [*MODIFIER, "--check"],
    "modifier, dry run": [*MODIFIER, "--linear-quant", "mxfp4", "--dry-run"],
    "modifier, an error as JSON": [*MODIFIER, "--linear-quant", "nonsense", "--json"],
}
ELSEWHERE = {
    **dict.fromkeys(("apply", "restore", "vendor"), "tests/mqo/overlay/test_transaction.py"),
    **dict.fromkeys(("verify", "setup"), "they write a tree, as apply does, and as data does"),
    **dict.fromkeys(
        ("eval", "generate", "stats", "runs", "compare"), "they print, as coverage does"
    ),
    "plugin": "it writes one file, as plot does, and prints",
    **dict.fromkeys(("rerun", "demo"), "they train, as train and sweep do"),
    "adopt": "tests/mqo/overlay/quant_types/test_adopt.py: a step that fails",
    "track": "tests/mqo/track: a run's own folder, and its tracker's",
}


# Not heavy: one command of each way to write.
LIGHT = ("plot, pdf", "report", "snapshot", "matrix", "data", "convert, to hf", "train, CHECKPOINT")


class Have:
    """What the commands read: a run that saved, and what was made of it."""

    def __init__(self, root, run):
        self.root, self.run = root, run
        self.hf, self.packed, self.text = root / "hf", root / "packed", root / "text.txt"


@pytest.fixture(scope="module")
def have(checkout_with, tmp_path_factory, vendored):
    root = tmp_path_factory.mktemp("trained")
    flags = (*TINY, "--micro-batch-size", "4", "--save-interval", "100")
    cell = resolve(
        *("llama32-1b", "wikipedia", "linear_mxfp8", "tiny"),
        checkpoint=root / "saved",
        extra_flags=flags,
        every=1,
    )
    found = Have(root, real_runs.run(checkout_with(runs=root / "runs"), cell).root)
    assert (RunFolder(found.run).quant_stats).is_file()
    convert.megatron_to_hf(vendored.root, found.run, found.hf)
    export(vendored.root, found.run, found.packed, layout="mqo")
    found.text.write_text("The miller grinds the barley at dawn. " * 40_000)
    return found


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small disk of its own."""
    place = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a disk cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk, free):
    (disk / FILL).write_bytes(b"\0" * (SIZE - free))


def run(words, **options):
    if words[: len(MQO)] == MQO:
        words = forking.launcher(sys.executable, *words[1:])
    words = [str(word) for word in words]
    options = {"stdout": subprocess.PIPE} | options
    return subprocess.run(words, stderr=subprocess.PIPE, text=True, **options)


def check_refused(done, *parts):
    """The last line is one error, which says what is full."""
    assert done.returncode not in (0, None)
    said = (done.stdout or "") + done.stderr
    assert "Traceback" not in said and "Exception ignored" not in said, said[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert "is full" in last, last
    for part in parts:
        assert str(part) in last


def marked(commands):
    """The commands as parameters, each one heavy unless it is LIGHT."""
    heavy = pytest.mark.heavy
    return [pytest.param(name, marks=() if name in LIGHT else heavy) for name in commands]


@pytest.mark.parametrize("free", [FREE[0], pytest.param(FREE[1], marks=pytest.mark.heavy)])
@pytest.mark.parametrize("command", marked(WRITES))
def test_a_command_names_the_full_disk_and_leaves_nothing(disk, have, command, free):
    fill(disk, free)
    done = run(WRITES[command](have, disk))
    left = sorted(path.name for path in disk.iterdir() if path.name != FILL)
    try:
        if free and done.returncode == 0:
            assert left, "it says that it wrote"
            return
        check_refused(done, disk)
        assert left == []
    finally:
        subprocess.run(["rm", "-rf", *(disk / name for name in left)], check=True)


@pytest.mark.parametrize("command", marked(TRAINS))
def test_a_training_names_the_full_disk(disk, have, command):
    fill(disk, 0)
    done = run(TRAINS[command](have, disk))
    files = [path for path in disk.rglob("*") if path.is_file() and path.name != FILL]
    subprocess.run(["rm", "-rf", *(p for p in disk.iterdir() if p.name != FILL)], check=True)
    check_refused(done, disk)
    assert not files


@pytest.mark.parametrize("command", PRINTS)
def test_a_command_whose_output_has_no_room_says_so(command):
    with Path("/dev/full").open("w") as full:
        done = run(PRINTS[command], stdout=full)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if "error" not in command:
        check_refused(done)


def test_every_command_is_in_one_of_the_lists():
    known = {name.partition(",")[0] for name in (*WRITES, *TRAINS, *PRINTS, *ELSEWHERE)}
    assert set(typer.main.get_command(cli.app).commands) <= known
