"""The sdist and the wheel: what they hold, and what the wheel does in an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from mqo.overlay.vendor import Pin
from mqo.project import Project

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOLDERS = ("patches/", "Megatron-LM/")
BUNDLE = "mqo/bundle/"


def tracked():
    """The names of what git tracks here, or would with the next `git add`."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with both, built in a copy of a checkout whose tree is vendored."""
    place = tmp_path_factory.mktemp("a checkout")
    for name in tracked():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place / name)
    for name in (
        "megatron/core/theirs.py",
        ".mqo/upstream.json",
        "mqo/quant/__pycache__/a.pyc",
    ):
        (place / "Megatron-LM" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "Megatron-LM" / name).write_text("not ours")
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", place / "dist", place]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (found,) = dist.glob("*.whl")
    return found


def test_the_wheel_holds_our_files_of_a_tree_and_nothing_of_upstreams(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    bundled = {name.removeprefix(BUNDLE) for name in names if name.startswith(BUNDLE)}
    assert bundled == {name for name in tracked() if name.startswith(FOLDERS)}
    package = {name for name in names if name.startswith("mqo/")} - {BUNDLE + n for n in bundled}
    mine = {name.removeprefix("tools/") for name in tracked() if name.startswith("tools/mqo/")}
    assert package == mine


def test_the_sdist_builds_it_and_holds_nothing_of_upstreams_either(dist):
    (found,) = dist.glob("*.tar.gz")
    with tarfile.open(found) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "setup.py", "constraints.txt", "patches/series.toml"} <= names
    assert not [
        name for name in names if "theirs" in name or ".mqo" in name or "__pycache__" in name
    ]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs a program of an empty environment that has the wheel: code, out, err."""
    place = tmp_path_factory.mktemp("an environment")
    venv.create(place / "env", with_pip=True, symlinks=True)
    programs = place / "env" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command = [*pip, "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(command, check=True, capture_output=True)
    homes = {"XDG_DATA_HOME": place / "data", "XDG_CACHE_HOME": place / "cache"}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MQO", "COV"))}

    def run(program, *words):
        command = [programs / program, *words]
        env_of = env | {name: str(path) for name, path in homes.items()}
        done = subprocess.run(command, cwd=place, env=env_of, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def tree(installed, tmp_path_factory):
    """A tree of the user's with Megatron in it, and what is in it."""
    project = Project.here()
    pin = Pin.load(project.upstream_pin)
    kept = next(
        (path for name in pin.wheels if (path := project.cache / "wheels" / name).exists()), None
    )
    root = tmp_path_factory.mktemp("trees") / "a tree"
    source = ("--from", kept) if kept else ()
    code, _, err = installed("mqo", "vendor", "--tree", root, *source)
    assert code == 0, err
    return root


def content(root):
    files = (path for path in (root / "megatron").rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_the_overlays_commands_work_without_torch_and_undo_what_they_did(installed, tree):
    code, out, _ = installed(
        "python", "-c", "import importlib.util as i; print(i.find_spec('torch'))"
    )
    assert (code, out) == (0, "None\n")
    before = content(tree)
    code, out, err = installed("mqo", "apply", "--tree", tree)
    assert (code, err) == (0, "")
    code, out, err = installed("mqo", "status", "--tree", tree, "--json")
    assert code == 0, err
    assert {entry["state"] for entry in json.loads(out)["entries"]} == {"applied"}
    code, out, err = installed("quant_type_modifier", "--tree", tree, "--qk-quant", "mxfp8")
    assert code == 0, err
    assert "undo: quant_type_modifier --restore" in out
    code, out, _ = installed("mqo", "diff", "--stat", "--tree", tree)
    assert (code, "dot_product_attention.py  +1 -1" in out) == (1, True)
    code, _, err = installed("mqo", "restore", "--tree", tree)
    assert code == 0, err
    assert content(tree) == before


@pytest.mark.heavy  # tests/mqo/overlay/verify/test_release.py has it without a wheel
def test_verify_compiles_what_it_cannot_run(installed, tree):
    code, out, err = installed("mqo", "verify", "--tree", tree)
    assert code == 0, err + out
    assert "comp" in out


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("sweep", "--models", "llama32-1b", "--modes", "bf16"), "train"),
        (("perf", "--model", "llama32-1b", "--mode", "bf16"), "train"),
    ],
)
def test_a_command_that_needs_an_extra_says_which(installed, words, extra):
    code, _, err = installed("mqo", *words)
    assert code == 2
    assert f"pip install 'mqo[{extra}]'" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory):
    """A folder with torch and what it imports, and nothing else."""
    torch = pytest.importorskip("torch")
    packages, folder = Path(torch.__file__).parents[1], tmp_path_factory.mktemp("torch alone")
    needed = ("fsspec", "functorch", "jinja2", "markupsafe", "mpmath", "networkx", "sympy")
    for name in (*needed, "numpy", "numpy.libs", "torch", "torchgen", "typing_extensions.py"):
        if (packages / name).exists():
            (folder / name).symlink_to(packages / name)
    return folder


def test_a_model_is_quantized_without_megatron_and_numba(installed, torch_alone):
    program = f"""
import sys
sys.path.append({str(torch_alone)!r})
from torch import nn, randn
from mqo.quant import quantize_model, sqnr
model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
quantization = quantize_model(model, "mxfp8")
model(randn(4, 64)).sum().backward()
print(*quantization.layers, sqnr(randn(4, 64), "nvfp4") > 15)
print(any(name.split(".")[0] in ("megatron", "numba", "transformers") for name in sys.modules))
"""
    code, out, err = installed("python", "-c", program)
    assert (code, out.split()) == (0, ["0", "1", "True", "False"]), err
    assert "Install numba" in err


def test_what_needs_a_clone_says_so(installed):
    code, _, err = installed("mqo", "matrix", "generate")
    assert (code, "a clone of mqo" in err) == (2, True)


def test_nothing_was_written_beside_the_package(installed):
    program = "import mqo.project as p\nfor path in p.BUNDLE.rglob('*'): print(path)"
    _, out, _ = installed("python", "-c", program)
    files = [line for line in out.splitlines() if Path(line).is_file()]
    names = {name.partition("/bundle/")[2] for name in files if not name.endswith(".pyc")}
    assert names == {name for name in tracked() if name.startswith(FOLDERS)}


def test_all_extras_at_once_resolve_against_the_pins():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = ",".join(table["project"]["optional-dependencies"])
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    command = [*pip, "-c", ROOT / "constraints.txt", "--no-build-isolation", f"{ROOT}[{extras}]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
