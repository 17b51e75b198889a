"""No command writes through a symbolic link that is given as its target."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from mqo import cli
from mqo.commands import train_config as launcher
from mqo.errors import DiskFullError, OutputError
from mqo.output import folder_of, new_file, target_of
from mqo.project import Project

PROJECT = Project.here()
SIMULATED = PROJECT.root / "script/llama32-1b/pretrain_llama32-1b_wikipedia_FA_linear_mxfp8.sh"
TRAIN = ["--model", "llama32-1b", "--dataset", "wikipedia", "--quantization", "bf16", "--dry-run"]
# (command, parameter): the words, with a place that is a link. Made new, or replaced whole:
TARGETS = {
    ("plot", "out"): lambda link: ["plot", "nothing", "-o", f"{link}.png"],
    ("sensitivity", "out"): lambda link: [
        *("sensitivity", "nothing", "--mode", "mxfp4", "-o", f"{link}.png")
    ],
    ("report", "out"): lambda link: ["report", "nothing", "-o", link],
    ("simulate", "page"): lambda link: ["simulate", SIMULATED, "--device", "h200", "-o", link],
    ("plugin new", "target"): lambda link: ["plugin", "new", link],
    ("snapshot", "target"): lambda link: ["snapshot", link],
    ("diff", "export"): lambda link: ["diff", "--export", link],
    ("convert hf-to-megatron", "target"): lambda link: ["convert", "hf-to-megatron", "x", link],
    ("convert finalize", "target"): lambda link: ["convert", "finalize", "x", link],
    ("convert megatron-to-hf", "target"): lambda link: ["convert", "megatron-to-hf", "x", link],
    ("export", "target"): lambda link: ["export", "x", link],
    ("data prepare", "output"): lambda link: [
        *("data", "prepare", "text", "--input", __file__, "--output", link.parent / "made"),
        *("--tokenizer", PROJECT.data / "wikipedia/tokenizer", "--workers", "1"),
    ],
}
# Commands add to these folders; a link to a folder is followed.
FOLDERS = {
    ("demo", "folder"): lambda link: ["demo", "-o", link],
    ("sweep", "folder"): lambda link: ["sweep", "--models", "llama32-1b", "-o", link],
    ("perf", "folder"): lambda link: [
        *("perf", "--model", "llama32-1b", "--mode", "mxfp8", "--training-config", "tiny"),
        *("-o", link),
    ],
    ("matrix generate", "out"): lambda link: [
        *("matrix", "generate", "--types", "nvfp4", "-o", link)
    ],
}
# Names of parameters that do not say where a command writes.
READ = {"tree", "trees", "source", "run", "runs", "checkpoints", "checkpoint", "text", "tokenizer"}
READ |= {"data_prefix", "data", "prompts", "script", "file", "input", "compare", "tasks_folder"}
READ |= {"plugin", "formats"}


def parameters(command, name=""):
    """(command, parameter) of every parameter that takes a path."""
    for child, one in getattr(command, "commands", {}).items():
        yield from parameters(one, f"{name} {child}".strip())
    for parameter in [] if hasattr(command, "commands") else command.params:
        if "path" in parameter.type.name or parameter.type.name in ("file", "directory"):
            yield name, parameter.name


def test_every_output_is_in_the_table():
    paths = {p for p in parameters(typer.main.get_command(cli.app)) if p[1] not in READ}
    assert paths == {*TARGETS, *FOLDERS}


def make_links(tmp_path, kind):
    """A link by each name that a command of the table may write to, and what it leads to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside / "target"
    if kind == "file":
        target.write_text("precious")
    elif kind == "folder":
        target.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    names = ("link", "link.png", "made.partial", "made_text_document.bin", "made_text_document.idx")
    for name in names:
        (here / name).symlink_to(target)
    return here / "link", outside


def contents(folder):
    return {str(p.relative_to(folder)): p.is_file() and p.read_text() for p in folder.rglob("*")}


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
@pytest.mark.parametrize("words", TARGETS.values(), ids=map(" ".join, TARGETS))
def test_a_link_as_the_target_is_refused(command_line, vendored, tmp_path, words, kind):
    link, outside = make_links(tmp_path, kind)
    before = contents(outside)
    code, _, err = command_line(*words(link))
    assert code == 2
    assert "symbolic link" in err and "Traceback" not in err
    assert contents(outside) == before
    assert link.is_symlink()


@pytest.mark.parametrize("words", FOLDERS.values(), ids=map(" ".join, FOLDERS))
def test_a_folder_that_is_a_dangling_link_is_refused(command_line, tmp_path, words):
    link, outside = make_links(tmp_path, "dangling")
    code, _, err = command_line(*words(link))
    assert code == 2 and str(link) in err and "Traceback" not in err
    assert contents(outside) == {}


def test_scripts_go_into_a_folder_through_a_link_but_over_no_link(command_line, tmp_path):
    link, outside = make_links(tmp_path, "folder")
    words = FOLDERS["matrix generate", "out"](link)
    assert command_line(*words)[0] == 0
    script = next((outside / "target").rglob("*.sh"))
    assert script.stat().st_mode & 0o111
    script.rename(outside / "moved")
    script.symlink_to(outside / "moved")
    (outside / "moved").write_text("precious")
    code, _, err = command_line(*words)
    assert code == 2 and "symbolic link" in err
    assert (outside / "moved").read_text() == "precious"


@pytest.mark.parametrize("place", ["CHECKPOINT", "TENSORBOARD", "--runs"])
def test_a_trainings_folders_may_be_links_to_folders(tmp_path, place):
    link, _ = make_links(tmp_path, "folder")
    words = ["--runs", link] if place == "--runs" else [link] * (1 + (place == "TENSORBOARD"))
    launcher.train_with([*map(str, words), *TRAIN], front_end=False)


@pytest.mark.parametrize("kind", ["file", "dangling"])
@pytest.mark.parametrize("place", ["CHECKPOINT", "TENSORBOARD", "--runs"])
def test_a_trainings_folder_that_is_another_link_is_refused(tmp_path, place, kind):
    link, outside = make_links(tmp_path, kind)
    before = contents(outside)
    words = {"CHECKPOINT": [link], "TENSORBOARD": [tmp_path, link], "--runs": ["--runs", link]}
    with pytest.raises(OutputError) as caught:
        launcher.train_with([*map(str, words[place]), *TRAIN], front_end=False)
    assert str(caught.value) == (
        f"{link} is a symbolic link to {link.readlink()}, which is not a folder. "
        "Expected: a folder, a link to a folder, or a new name. "
        "Make the folder that the link leads to, or remove the link."
    )
    assert contents(outside) == before


def test_links_above_the_target_are_followed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert target_of(tmp_path / "link/new") == tmp_path / "data/new"
    assert folder_of(tmp_path / "link") == tmp_path / "data"
    assert target_of(tmp_path / "link/..") == tmp_path


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "deep" / "a.txt"
    with new_file(file) as new:
        new.write_text("old")
        assert not file.exists()
    with pytest.raises(DiskFullError, match=str(file.parent)), new_file(file) as new:
        new.write_text("half")
        Path("/dev/full").write_text("more")
    assert file.read_text() == "old"
    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_the_programs_of_the_tree_refuse_one_too(tmp_path, kind):
    """Each refuses its target before it reads anything."""
    pytest.importorskip("torch")
    link, outside = make_links(tmp_path, kind)
    before = contents(outside)
    ptq = PROJECT.ours / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py"
    programs = [
        [PROJECT.ours / "tools/dequantize.py", tmp_path, link],
        [ptq, "--load", tmp_path, "--export-quant-cfg", "fp8", "--save", link],
        [ptq, "--load", tmp_path, "--export-format", "hf", "--export-dir", link],
    ]
    for words in programs:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert done.returncode != 0 and "already exists" in done.stderr
    assert contents(outside) == before
