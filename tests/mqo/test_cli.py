import hashlib
import json
import os
import subprocess
import sys
import tomllib

import pytest
import typer
from mqo import cli
from mqo.launch import coverage
from mqo.launch.products import Coverage, Product
from mqo.project import Project
from typer.testing import CliRunner

from .conftest import FILES, materialize, refused

PIN = Project.here().upstream_pin
# Of the text at apache.org/licenses/LICENSE-2.0.txt, with its placeholder for the owner.
APACHE_OWNER = "[yyyy] [name of copyright owner]"
APACHE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


# -- the tour ----------------------------------------------------------------------------------


def test_apply_status_diff_restore(mqo, mini):
    assert mqo("status")[0] == 1
    assert mqo("apply") == (0, "applied ours, quant_sites, new_engine: 3 files written\n", "")
    assert mqo("apply") == (0, "nothing to do: already applied (3 files)\n", "")
    code, out, _ = mqo("status")
    assert code == 0
    assert "megatron-core 1.2.3\nfrom wheel of our own" in out
    assert "fprop  none     megatron/core/layers.py:" in out
    assert "+        custom_quant_type = 'none'" in mqo("diff")[1]
    assert "+start = new_engine.start" in mqo("diff", "--all")[1]
    assert mqo("restore") == (0, "restored ours, quant_sites, new_engine: 3 files written\n", "")
    assert mqo("restore") == (0, "nothing to do: no patch is applied\n", "")
    assert mini.bytes() == FILES


def test_status_leaves_with_1_and_names_a_hand_edit(mqo, patched):
    patched.edit("core/plain.py", b"42", b"43")
    code, out, _ = mqo("status")
    assert code == 1
    assert "changed by hand: megatron/core/plain.py" in out


def test_a_snapshot_takes_types(mqo, patched, tmp_path):
    code, out, _ = mqo("snapshot", tmp_path / "shot", "--type", "fprop=mxfp8")
    assert (code, out) == (0, f"{tmp_path / 'shot'}: fprop=mxfp8 dgrad=none\n")


def test_a_snapshot_without_an_entry(mqo, patched, tmp_path):
    assert mqo("snapshot", tmp_path / "shot", "--without", "new_engine")[0] == 0
    gadget = "megatron/core/gadget.py"
    assert (tmp_path / "shot" / gadget).read_bytes() == FILES[gadget]


def test_a_command_is_in_the_file_of_its_name():
    folder = Project.here().root / "tools/mqo/commands"
    files = {file.stem for file in folder.glob("[!_]*.py")}
    found = typer.main.get_command(cli.app).commands
    for name, command in found.items():
        for one in getattr(command, "commands", {"": command}).values():
            assert one.callback.__module__ == f"mqo.commands.{name}"
    assert files == {*found, "options", "train_config", "quant_type_modifier"}


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["", "convert", "data", "formats", "matrix", "plugin", "recipe"])
def test_a_mistyped_command_has_one_suggestion(group):
    click = typer.main.get_command(cli.app)
    name = next(iter((click.commands[group] if group else click).commands))
    result = CliRunner().invoke(cli.app, [*group.split(), name[:-1]])
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1
    assert result.output.count(f"'{name}'") == 1


@pytest.mark.parametrize(
    ("words", "meant"), [("trian", "train"), ("report --tolerence 1", "--tolerance")]
)
def test_only_the_nearest_name_is_suggested(words, meant):
    result = CliRunner().invoke(cli.app, words.split())
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1
    assert f"Did you mean '{meant}'" in result.output


@pytest.mark.parametrize("command", ["apply", "restore", "status", "diff"])
def test_a_folder_without_a_tree(mqo, tmp_path, command):
    nowhere = tmp_path / "nowhere"
    refused(mqo(command, tree=nowhere), str(nowhere), "Run `mqo vendor`.")
    assert not nowhere.exists()


@pytest.mark.parametrize("command", ["apply", "restore"])
def test_an_edited_file(mqo, patched, command):
    patched.edit("core/layers.py", b"A linear", b"My linear")
    refused(mqo(command), "megatron/core/layers.py", "--force")


def test_a_tree_of_another_version(mqo, tmp_path):
    other = materialize(tmp_path / "other", FILES, version="3.0.0")
    refused(mqo("apply", tree=other.root), ">=1,<2", "3.0.0")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["diff", "typo"], ["no patch called 'typo'", "new_engine, ours, quant_sites"]),
        (["snapshot", "{new}", "--type", "fprop"], ["has no '='", "qk=mxfp8"]),
        (["snapshot", "{new}", "--type", "qq=mxfp8"], ["no GEMM site called 'qq'", "dgrad, fprop"]),
        (["snapshot", "{new}", "--without", "typo"], ["no patch called 'typo'"]),
        (["snapshot", "{old}"], ["exists"]),
    ],
)
def test_names_that_there_are_not(mqo, patched, tmp_path, words, parts):
    words = [word.format(new=tmp_path / "shot", old=tmp_path) for word in words]
    refused(mqo(*words), *parts)
    assert not (tmp_path / "shot").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["gpt", "bf16"], ["no model called 'gpt'", "llama31-8b, llama32-1b"]),
        (["llama32-1b", "fp8"], ["no quantization mode called 'fp8'", "FA_linear_T"]),
        (["llama32-1b", "bf16", "--gemms", "wgrad"], ["no choice of GEMMs called", "all, fprop"]),
        (["llama32-1b", "bf16", "--training-config", "x"], ["called 'x'", "fast, smoke, standard"]),
    ],
)
def test_a_coverage_of_names_that_there_are_not(mqo, words, parts):
    model, mode, *rest = words
    refused(mqo("coverage", "--model", model, "--mode", mode, *rest), *parts)


@pytest.mark.parametrize(
    "words", [("compare", "", "x"), ("report", ""), ("runs", "--runs", ""), ("",), ("perf", "")]
)
def test_an_empty_argument_is_refused(mqo, words):
    refused(mqo(*words), "is empty")


def test_an_unpatched_tree_has_no_coverage(mqo):
    refused(mqo("coverage", "--model", "llama32-1b", "--mode", "bf16"), "Run `mqo apply`.")


def test_a_coverage_is_of_a_mode_or_a_recipe(mqo):
    words = ("coverage", "--model", "llama32-1b")
    refused(mqo(*words), "or --recipe is missing")
    refused(mqo(*words, "--mode", "bf16", "--without", "hadamard"), "Expected: --recipe")
    refused(mqo(*words, "--recipe", "mxfp8", "--without", "hadamard"), "has no hadamard")


def test_a_coverage_as_text_and_as_json(mqo, monkeypatch):
    made = Coverage(1, 8, 9, (Product("up", "fprop", "mxfp8", 1, 2, 3, 4, 1, 48),), ("words",))
    monkeypatch.setattr(coverage, "of_config", lambda project, tree, series, cell: made)
    words = ("coverage", "--model", "llama32-1b", "--mode", "linear_mxfp8", "--gemms", "all")
    code, out, _ = mqo(*words)
    assert code == 0
    assert out.startswith("llama32-1b, linear_mxfp8, all GEMMs, standard\n")
    assert "100.0% of the FLOPs are quantized" in out
    code, out, _ = mqo(*words, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["command"], facts["gemms"], facts["quantized_share"]) == ("coverage", "all", 1)
    assert facts["products"][0]["reason"] == ""


def test_an_unpatched_tree_has_no_snapshot(mqo, tmp_path):
    refused(mqo("snapshot", tmp_path / "shot"), "is not patched", "Run `mqo apply`.")


def test_a_damaged_record(mqo, patched):
    (patched.tree.store / "manifest.json").write_text("{")
    for command in ("apply", "restore", "status"):
        refused(mqo(command), "manifest.json is damaged", "mqo vendor --force")


def test_a_wheel_that_is_not_pinned(mqo, tmp_path):
    (tmp_path / "Megatron-LM").mkdir()
    (tmp_path / "Megatron-LM/UPSTREAM.toml").write_bytes(PIN.read_bytes())
    (tmp_path / "x.whl").write_bytes(b"")
    outcome = mqo("vendor", "--force", "--from", tmp_path / "x.whl")
    refused(outcome, "x.whl is not among the wheels that UPSTREAM.toml pins")


# -- the version -------------------------------------------------------------------------------


def test_the_version_names_the_release_the_pin_and_the_commit(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mqo", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None)
    line = capsys.readouterr().out
    pin = tomllib.loads(PIN.read_text())["version"]
    project = tomllib.loads((PIN.parents[1] / "pyproject.toml").read_text())["project"]
    assert line.startswith(f"mqo {project['version']} (megatron-core {pin}")
    assert (Project.here().commit() or "") in line


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    assert Project(tmp_path).commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Project.here().commit() is None


def test_the_license_is_the_standard_text_and_the_one_that_is_declared():
    root = PIN.parents[1]
    assert (
        tomllib.loads((root / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"
    )
    text = (root / "LICENSE").read_text()
    assert text.count("Copyright 2026 The Megatron Quant Overlay authors") == 1
    template = text.replace("2026 The Megatron Quant Overlay authors", APACHE_OWNER)
    assert hashlib.sha256(template.encode()).hexdigest() == APACHE_SHA256


# -- help and completion -----------------------------------------------------------------------


def test_each_command_is_in_one_panel():
    listed = [command for panel in cli.PANELS.values() for command in panel.split()]
    assert len(listed) == len({*listed}) == len(typer.main.get_command(cli.app).commands)
    said = CliRunner().invoke(cli.app, ["--help"]).output
    assert all(f"─ {panel} ─" in said for panel in cli.PANELS)
    assert "─ Commands ─" not in said


@pytest.mark.parametrize(
    ("words", "offered"),
    [("tra", "track train"), ("report --tol", "--tolerance"), ("train --dry", "--dry-run")],
)
def test_a_shell_completes_commands_and_options(words, offered):
    line = ["mqo", *words.split()]
    completing = {"_MQO_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | completing | {"COMP_CWORD": str(len(line) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    *names, imported = done.stdout.split("\n")[:-1]
    assert (sorted(names), json.loads(imported), done.stderr) == (offered.split(), [], "")


# -- what starting costs -----------------------------------------------------------------------

HEAVY = ["torch", "libcst", "numpy", "megatron"]
PROGRAM = f"""
import json, sys
from mqo import cli
try:
    cli.main()
except SystemExit:
    pass
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["status"], ["diff"]])
def test_reading_commands_import_neither_torch_nor_libcst(patched, words):
    tree = [] if words[0].startswith("--") else ["--tree", str(patched.tree.root)]
    command = [sys.executable, "-c", PROGRAM, *words, *tree]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert len(done.stdout.splitlines()) > (1 if words == ["--version"] else 3)


def commands(group, name="mqo"):
    """(name, command) of all below."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def test_every_command_argument_and_option_has_a_help():
    found = dict(commands(typer.main.get_command(cli.app)))
    assert len(found) > 20
    assert [name for name, command in found.items() if not command.help] == []
    bare = [(name, p.name) for name, c in found.items() for p in c.params if not p.help]
    assert bare == []
