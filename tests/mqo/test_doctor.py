import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib.machinery import PathFinder
from pathlib import Path

import psutil
import pytest
from mqo import doctor
from mqo.doctor import GIB, Diagnosis, Finding, diagnosis_lines, examine
from mqo.launch import machine
from mqo.megatron.run import isolated
from mqo.overlay.apply import apply
from mqo.overlay.tree import Tree
from mqo.project import Project

from .conftest import FILES, materialize

MODULES = ("torch", "transformer_engine", "apex", "amp_C", "triton", "numba", "modelopt")
Disk = namedtuple("Disk", "free")
Memory = namedtuple("Memory", "available")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder in which alone the pieces are looked for."""
    folder = tmp_path / "site"
    folder.mkdir()
    find_spec = importlib.util.find_spec

    def find_spec_here(name):
        found = PathFinder.find_spec(name, [str(folder)])
        return found if name in MODULES else find_spec(name)

    def version_here(name):
        for distribution in importlib.metadata.distributions(name=name, path=[str(folder)]):
            return distribution.version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec_here)
    monkeypatch.setattr(importlib.metadata, "version", version_here)
    return folder


@pytest.fixture
def room(monkeypatch):
    """A function that sets free disk, total and free memory, in GiB."""

    def put(disk=100, total=64, free=32):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(disk * GIB))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(free * GIB))
        monkeypatch.setattr(isolated, "machine_memory", lambda: total * GIB)

    put()
    return put


@pytest.fixture
def project(tmp_path, site, room, monkeypatch):
    """A project with a Megatron of the pinned version, and torch: all that is required."""
    (tmp_path / "Megatron-LM").mkdir()
    shutil.copy(Project.here().upstream_pin, tmp_path / "Megatron-LM")
    project = Project(tmp_path)
    materialize(project.tree, FILES, version=pinned(project))
    install(site, "torch", "2.9.0", "torch")
    (site / "torch/version.py").write_text("cuda: Optional[str] = None\nhip = '6'\n")
    monkeypatch.setattr(machine, "_cuda_devices", list)
    return project


@pytest.fixture
def gpu(project, monkeypatch):
    """The project on a machine with a GPU that torch can use."""
    torch = importlib.util.find_spec("torch").origin
    Path(torch).with_name("version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(machine, "_cuda_devices", lambda: [(1 << 30, "a GPU")])
    return project


def pinned(project):
    return doctor.Pin.load(project.upstream_pin).version


def install(site, distribution, version, module=None):
    """Lay down a distribution's metadata and, when given, a module of one empty package."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
    if module:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text("raise AssertionError('imported')\n")


def found(project, what, tree=None):
    """The one finding about `what`."""
    findings = examine(project, tree or Tree(project.tree)).findings
    (finding,) = [finding for finding in findings if finding.what == what]
    return finding


# -- what nothing trains without -----------------------------------------------------------------


def test_with_what_is_required_nothing_needs_action(project):
    diagnosis = examine(project, Tree(project.tree))
    assert diagnosis.clean
    states = {finding.what: finding.state for finding in diagnosis.findings}
    assert [what for what, state in states.items() if state == "ok"] == [
        *("Python", "torch", "Megatron core", "disk", "memory")
    ]
    assert all(f.cost for f in diagnosis.findings if f.state == "missing")
    said = {finding.what: finding.found for finding in diagnosis.findings}
    assert said["Python"] == f"{sys.version.split()[0]}, {sys.executable}"
    assert said["disk"] == f"100 GiB free at {project.root}"
    assert said["memory"] == "32 of 64 GiB free"


def test_without_torch_nothing_trains(project, site):
    shutil.rmtree(site)
    torch = found(project, "torch")
    assert (torch.state, torch.found, torch.needs_action) == ("missing", "not installed", True)
    assert "nothing trains" in torch.cost
    assert found(project, "CUDA").state == "missing"


def test_a_torch_of_which_only_the_metadata_is_left_is_missing(project, site):
    shutil.rmtree(site / "torch")
    torch = found(project, "torch")
    assert (torch.state, torch.found) == ("missing", "2.9.0 by its metadata, but no module")


@pytest.mark.parametrize(
    ("line", "devices", "state", "text"),
    [
        ("cuda: Optional[str] = None", 2, "missing", "no torch built for CUDA"),
        ("cuda: Optional[str] = '13.0'", 0, "missing", "torch has 13.0, but no device was found"),
        ("cuda: Optional[str] = '13.0'", 1, "ok", "13.0, 1 device"),
        ('cuda = "12.8"', 8, "ok", "12.8, 8 devices"),
    ],
)
def test_cuda_is_a_torch_built_for_it_and_a_device(
    project, site, monkeypatch, line, devices, state, text
):
    (site / "torch/version.py").write_text(f"{line}\ngit_version = 'x'\n")
    monkeypatch.setattr(machine, "_cuda_devices", lambda: [(1 << 30, "a GPU")] * devices)
    cuda = found(project, "CUDA")
    assert (cuda.state, cuda.found, cuda.needs_action) == (state, text, False)


# -- Megatron ------------------------------------------------------------------------------------


def test_a_pristine_and_a_patched_tree(project, mini):
    version = pinned(project)
    assert found(project, "Megatron core").found == f"{version}, not patched"
    apply(mini.tree, mini.series)
    assert found(project, "Megatron core", mini.tree).found == "1.2.3, patched"


def test_a_tree_that_is_not_vendored_says_which_command_brings_it(project):
    shutil.rmtree(project.tree / ".mqo")
    megatron = found(project, "Megatron core")
    assert (megatron.state, megatron.needs_action) == ("missing", True)
    assert "`mqo vendor` fetches it, `mqo apply` patches it" in megatron.cost


def test_another_tree_that_is_not_there_is_named_in_the_command(project, tmp_path):
    megatron = found(project, "Megatron core", Tree(tmp_path / "no where"))
    assert megatron.found == f"no Megatron in {tmp_path / 'no where'}"
    assert f"`mqo vendor --tree '{tmp_path / 'no where'}'`" in megatron.cost
    assert not (tmp_path / "no where").exists()


def test_the_projects_tree_must_hold_the_pinned_version_and_another_need_not(project, mini):
    assert found(project, "Megatron core", mini.tree).state == "ok"
    materialize(project.tree, FILES, version="1.2.3")
    megatron = found(project, "Megatron core")
    assert (megatron.state, megatron.found) == ("warning", "1.2.3, not patched")
    assert f"{pinned(project)} is pinned" in megatron.cost


def test_a_damaged_record_is_a_warning(project):
    (project.tree / ".mqo/manifest.json").write_text("{")
    megatron = found(project, "Megatron core")
    assert megatron.state == "warning"
    assert "manifest.json is damaged" in megatron.found
    assert "mqo vendor --force" in megatron.cost


def test_a_second_megatron_installed_with_pip_is_a_warning(project, site):
    install(site, "megatron-core", "0.16.1")
    second = found(project, "megatron-core")
    assert (second.state, second.found) == ("warning", "0.16.1, installed with pip")
    assert "`pip uninstall megatron-core`" in second.cost


# -- what is optional ----------------------------------------------------------------------------

OPTIONAL = [
    ("triton", "triton", "triton"),
    ("numba", "numba", "numba"),
    ("modelopt", "nvidia-modelopt", "modelopt"),
    ("apex", "apex", "apex"),
    ("Transformer Engine", "transformer-engine", "transformer_engine"),
]


@pytest.mark.parametrize(("what", "distribution", "module"), OPTIONAL)
def test_an_optional_piece_is_found(gpu, site, what, distribution, module):
    assert found(gpu, what).found == "not installed"
    install(site, distribution, "2.20", module)
    (site / module / "normalization").mkdir()
    (site / module / "libtransformer_engine.so").touch()
    (site / "amp_C.py").touch()
    piece = found(gpu, what)
    assert (piece.state, piece.found, piece.cost) == ("ok", "2.20", "")


@pytest.mark.parametrize(
    ("what", "module"), [("apex", "apex"), ("Transformer Engine", "transformer_engine")]
)
def test_without_a_gpu_even_a_broken_one_is_no_matter(project, site, what, module):
    install(site, module.replace("_", "-"), "3.1", module)
    piece = found(project, what)
    assert (piece.state, piece.cost, piece.needs_action) == ("ok", "", False)
    assert "not used" in piece.found


def test_a_module_without_metadata_is_there_too(project, site):
    (site / "triton").mkdir()
    assert found(project, "triton").state == "missing"
    (site / "triton/__init__.py").touch()
    triton = found(project, "triton")
    assert (triton.state, triton.found) == ("ok", f"of unknown version, in {site / 'triton'}")


@pytest.mark.parametrize("version", ["0.9.10.dev0", None])
def test_the_unrelated_apex_is_a_warning(gpu, site, version):
    if version:
        install(site, "apex", version, "apex")
    else:
        (site / "apex").mkdir()
        (site / "apex/__init__.py").touch()
    apex = found(gpu, "apex")
    assert (apex.state, apex.needs_action) == ("warning", True)
    assert "the unrelated package of that name on PyPI" in apex.found
    assert "`pip uninstall apex`" in apex.cost


def test_an_apex_without_its_extensions_is_a_warning(gpu, site):
    install(site, "apex", "0.1", "apex")
    (site / "apex/normalization").mkdir()
    apex = found(gpu, "apex")
    assert (apex.state, apex.found) == ("warning", "0.1, without its CUDA extensions")


def test_a_transformer_engine_without_its_library_is_a_warning(gpu, site):
    install(site, "transformer-engine", "2.9.0", "transformer_engine")
    engine = found(gpu, "Transformer Engine")
    assert (engine.state, engine.found) == ("warning", "2.9.0, without its compiled library")
    assert "`pip uninstall transformer-engine`" in engine.cost


@pytest.mark.parametrize("place", ["", "transformer_engine", "transformer_engine/wheel_lib"])
def test_the_library_of_transformer_engine_has_three_places(gpu, site, place):
    install(site, "transformer-engine", "2.20.2", "transformer_engine")
    (site / place).mkdir(exist_ok=True)
    (site / place / "libtransformer_engine.so").touch()
    assert found(gpu, "Transformer Engine").state == "ok"


def test_a_transformer_engine_that_is_not_known_quantizes_nothing(gpu, site):
    install(site, "transformer-engine", "2.9.0", "transformer_engine")
    (site / "libtransformer_engine.so").touch()
    engine = found(gpu, "Transformer Engine")
    assert (engine.state, engine.cost) == ("warning", "its layers run only with bf16")
    assert engine.found == "2.9.0; supported releases are 2.10 to 2.20"


# -- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_little_room_is_a_warning(project, room, what):
    room(disk=4, free=3)
    finding = found(project, what)
    assert (finding.state, finding.needs_action) == ("warning", True)
    assert "with less than" in finding.cost


def test_a_container_has_no_more_memory_than_its_limit(project, room):
    room(total=8)
    assert found(project, "memory").found == "8 of 8 GiB free"
    room()
    assert found(project, "memory").found == "32 of 64 GiB free"


# -- the report ----------------------------------------------------------------------------------


def test_the_report_is_aligned_and_wrapped_at_80_columns():
    word = "/a" * 50
    findings = (
        Finding("one", "ok", "1.0"),
        Finding("the second", "missing", "not installed", "no end of " * 9 + "words"),
        Finding("path", "warning", word, "--a-long-option stays whole"),
    )
    text = list(diagnosis_lines(Diagnosis(findings)))
    assert text[0] == "ok       one         1.0"
    assert text[1] == "missing  the second  not installed"
    assert text[2].startswith(" " * 21 + "no end of no end of")
    assert text[-3] == f"warning  path        {word}"
    assert text[-1] == "needs action: path"
    assert all(len(line) <= 80 for line in text if word not in line)


def test_a_report_without_anything_to_do():
    missing = Finding("apex", "missing", "not installed", "slower")
    assert list(diagnosis_lines(Diagnosis((missing,))))[-1] == "nothing needs action"
    required = Finding("torch", "missing", "not installed", "nothing trains", required=True)
    assert list(diagnosis_lines(Diagnosis((missing, required))))[-1] == "needs action: torch"


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def mqo(project, monkeypatch, command_line):
    """A function that runs `mqo doctor` in the project: its exit code and its output."""
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: project))

    def run(*words):
        code, out, err = command_line("doctor", *words)
        assert "Traceback" not in err
        return code, out

    return run


def test_the_command_leaves_with_0_when_only_optional_pieces_are_missing(mqo):
    code, out = mqo()
    assert code == 0
    assert "missing  apex                not installed\n" in out
    assert out.endswith("nothing needs action\n")


def test_the_command_leaves_with_1_on_a_warning(mqo, gpu, site):
    install(site, "apex", "0.9.10.dev0", "apex")
    code, out = mqo()
    assert code == 1
    assert out.endswith("needs action: apex\n")


def test_the_command_leaves_with_1_without_the_tree_that_is_asked_for(mqo, tmp_path):
    code, out = mqo("--tree", tmp_path / "nowhere")
    assert code == 1
    assert "missing  Megatron core " in out
    assert out.endswith("needs action: Megatron core\n")


def test_the_command_leaves_with_2_on_an_error(mqo):
    assert mqo("--typo") == (2, "")


def test_the_command_as_json(mqo, room):
    code, out = mqo("--json")
    table = json.loads(out)
    assert (code, table["schema"], table["command"], table["clean"]) == (0, 1, "doctor", True)
    assert [row["what"] for row in table["findings"]] == [
        *("Python", "torch", "CUDA", "Megatron core", "Transformer Engine", "apex"),
        *("triton", "numba", "modelopt", "disk", "memory"),
    ]
    assert set(table["findings"][0]) == {"what", "state", "found", "cost", "required"}
    room(disk=1)
    code, out = mqo("--json")
    assert (code, json.loads(out)["clean"]) == (1, False)


def test_the_command_imports_none_of_the_pieces():
    program = (
        "import sys\nfrom mqo import cli\nsys.argv = ['mqo', 'doctor']\n"
        f"try: cli.main()\nexcept SystemExit: print([n for n in {MODULES} if n in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "torch" in done.stdout
