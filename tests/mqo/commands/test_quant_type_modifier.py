import json
import os
import shlex

import pytest
from mqo.commands import quant_type_modifier as cli
from mqo.overlay.quant_types import modifier
from mqo.project import Project

from ..overlay.quant_types.lookalike import ATTENTION, LAYERS, attention, layers, read, write


@pytest.fixture
def root(tmp_path):
    return write(tmp_path, {LAYERS: layers(), ATTENTION: attention()})


@pytest.fixture
def call(root, capfd):
    """Run a command line on the tree: its exit code, stdout and stderr."""

    def run(line, tree=root):
        code = cli.main([*shlex.split(line), *(["--tree", str(tree)] if tree else [])])
        return code, *capfd.readouterr()

    return run


def test_check_is_a_table_of_sites_also_of_links_and_read_only_files(call, root, tmp_path):
    (root / LAYERS).chmod(0o444)
    (root / ATTENTION).rename(tmp_path / "elsewhere.py")
    (root / ATTENTION).symlink_to(tmp_path / "elsewhere.py")
    code, out, err = call("--check")
    assert (code, err) == (0, "")
    assert out == (
        f"{root}\n"
        "site   type         where\n"
        f"fprop  hifp8        {LAYERS}:5\n"
        f"dgrad  mxfp8        {LAYERS}:11\n"
        f"wgrad  none         {LAYERS}:15\n"
        f"qk     mxfp4        {ATTENTION}:3\n"
        f"pv     none (bf16)  {ATTENTION}:6\n"
    )


def test_check_after_a_modification_shows_what_was_before(call):
    call("--linear-quant mxfp4")
    assert f"fprop  mxfp4        {LAYERS}:5  was hifp8\n" in call("--check")[1]


def test_check_with_something_due_ends_with_1(call, root):
    write(root, {LAYERS: layers("custom_quant_type = f()\nreturn mm(x, custom_quant_type)\n")})
    code, out, _ = call("--check")
    assert code == 1
    assert f"fprop  ?            {LAYERS}:5\n              not set by a string" in out
    assert f"due: {LAYERS}:5 does not set" in out


def test_check_shows_an_absent_site(call, root):
    write(root, {LAYERS: layers(backward="pass\n")})
    code, out, _ = call("--check")
    assert code == 0
    assert f"dgrad  -            {LAYERS}:3  absent\n" in out


def test_check_of_a_tree_without_its_attention_ends_with_1(call, root):
    (root / ATTENTION).unlink()
    code, out, _ = call("--check")
    assert code == 1
    assert f"due: {ATTENTION} does not exist\n" in out


def test_a_literal_of_two_sites_takes_an_option_of_its_own(call, root):
    body = "custom_quant_type = 'mxfp8'\ns = mm(query, key, custom_quant_type)\n"
    write(root, {ATTENTION: attention(body + "return mm(s, value, custom_quant_type)\n")})
    code, out, _ = call("--check")
    assert code == 0
    assert f"qk     mxfp8  {ATTENTION}:3\n              shared with pv\n" in out
    assert json.loads(call("--check --json")[1])["sites"][-1]["shares"] == ["qk"]
    assert call("--pv-quant none")[0] == 2
    code, out, _ = call("--pv-quant none --shared")
    assert (code, out.splitlines()[:2]) == (
        0,
        [f"qk     mxfp8 -> none  {ATTENTION}:3", f"pv     mxfp8 -> none  {ATTENTION}:3"],
    )


@pytest.mark.parametrize(
    "break_it",
    [
        lambda file: file.write_text("class\n"),
        lambda file: file.write_bytes(b"x = '\xe9'\n"),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), file.symlink_to(file)),
    ],
    ids=["no Python", "not UTF-8", "a folder", "a link to itself"],
)
def test_check_of_an_unreadable_file_ends_with_2_and_one_paragraph(call, root, break_it):
    break_it(root / ATTENTION)
    code, out, err = call("--check")
    assert (code, out) == (2, "")
    assert err.startswith("quant_type_modifier: ")
    assert "dot_product_attention.py" in err
    assert err.count("\n") == 1


def test_the_documented_combination_sets_three_sites(call, root):
    code, out, err = call("--linear-quant mxfp4 --qk-quant mxfp8 --pv-quant hifp8")
    assert code == 0
    assert out == (
        f"fprop  hifp8 -> mxfp4  {LAYERS}:5\n"
        f"qk     mxfp4 -> mxfp8  {ATTENTION}:3\n"
        f"pv     bf16 -> hifp8  {ATTENTION}:6\n"
        f"undo: python3 script/quant_type_modifier.py --restore --tree {root}\n"
    )
    assert err.startswith("warning: linear layers differ: fprop mxfp4, dgrad mxfp8, wgrad none;\n")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--linear-quant", f"fprop  hifp8 -> mxfp4  {LAYERS}:5"),
        ("--dgrad-quant", f"dgrad  mxfp8 -> mxfp4  {LAYERS}:11"),
        ("--wgrad-quant", f"wgrad  none -> mxfp4  {LAYERS}:15"),
        ("--pv-quant", f"pv     bf16 -> mxfp4  {ATTENTION}:6"),
    ],
)
def test_each_option_sets_its_site_and_restore_takes_it_back(call, root, option, line):
    before = read(root)
    code, out, _ = call(f"{option} mxfp4")
    assert (code, out.splitlines()[0]) == (0, line)
    code, out, _ = call("--restore")
    assert (code, read(root)) == (0, before)
    assert out.splitlines()[-1] == f"restored {line.split()[-1].split(':')[0]}"


def test_nothing_to_do_is_said(call):
    assert call("--qk-quant mxfp4")[:2] == (0, "nothing to do: qk is mxfp4 already\n")
    assert call("--restore")[:2] == (0, "nothing to do: nothing is modified\n")
    assert call("--qk-quant mxfp4 --dry-run")[1] == "nothing to do: qk is mxfp4 already\n"


def test_a_dry_run_prints_the_diff_and_writes_nothing(call, root):
    before = read(root)
    code, out, _ = call("--qk-quant none --dry-run")
    assert code == 0
    assert f"\n--- a/{ATTENTION}\n+++ b/{ATTENTION}\n@@ " in out
    assert "-        custom_quant_type = 'mxfp4'\n+        custom_quant_type = 'none'\n" in out
    assert read(root) == before
    assert not (root / ".mqo").exists()


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no command"),
        ("--check --restore", "combined"),
        ("--check --shared", "--shared needs"),
        ("--qk-quant none --force", "--force needs --restore"),
        ("--check --qk-quant none", "combined"),
        ("--qk-quant", "expected one argument"),
        ("--qk none", "unrecognized arguments: --qk none"),
        ("--qk-quant bf16", "'bf16'. Expected: one of fp4_ue5m3, fp8"),
        ("--qk-quant ''", " ''. Expected: one of fp4_ue5m3, fp8"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_paragraph(call, line, said):
    code, out, err = call(line)
    assert (code, out) == (2, "")
    assert err.startswith("quant_type_modifier: ")
    assert said in err
    assert err.count("\n") == 1


def test_the_whole_text_of_an_error(call):
    assert call("--check --shared")[2] == (
        "quant_type_modifier: The command line is invalid: --shared needs a type to set. Expected: "
        "--check, --restore, or types to set, such as --linear-quant mxfp8. `python3 "
        "script/quant_type_modifier.py --help` lists the options.\n"
    )


def test_a_refused_site_ends_with_2_and_its_file_and_line(call, root):
    write(root, {ATTENTION: attention("s = mm(query, key)\nreturn mm(s, value)\n")})
    code, out, err = call("--qk-quant mxfp8")
    assert (code, out) == (2, "")
    assert err.startswith(f"quant_type_modifier: {ATTENTION}:3 (DotProductAttention) has no")


def test_a_tree_that_is_none_ends_with_2(call, tmp_path):
    code, _, err = call("--check", tree=tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err and "`mqo vendor`" in err


# -- JSON --------------------------------------------------------------------------------------


def test_check_as_json(call, root):
    code, out, _ = call("--check --json")
    table = json.loads(out)
    assert code == 0
    assert (table["schema"], table["command"], table["tree"]) == (1, "check", str(root))
    assert (table["due"], table["notes"]) == ([], [])
    assert table["sites"][-1] == {
        "site": "pv",
        "type": "none",
        "values": ["bf16"],
        "was": None,
        "path": ATTENTION,
        "line": 6,
        "editable": True,
        "shares": [],
        "note": "",
        "refusal": "",
    }


def test_a_modification_and_a_restoration_as_json(call):
    code, out, err = call("--linear-quant mxfp4 --json")
    table = json.loads(out)
    assert (code, err, table["command"], table["dry_run"]) == (0, "", "modify", False)
    edit = {"site": "fprop", "path": LAYERS, "line": 5, "before": "hifp8", "after": "mxfp4"}
    assert table["edits"] == [edit]
    assert table["files"] == [LAYERS]
    assert table["warnings"][0].startswith("linear layers differ")
    assert "+        custom_quant_type = 'mxfp4'  # of the product\n" in table["diff"]
    table = json.loads(call("--restore --json --dry-run")[1])
    assert (table["command"], table["dry_run"]) == ("restore", True)
    assert table["edits"] == [{**edit, "before": "mxfp4", "after": "hifp8"}]


def test_an_error_as_json_is_on_both_channels(call):
    code, out, err = call("--qk-quant x --json")
    assert code == 2
    assert json.loads(out)["error"] == err.removeprefix("quant_type_modifier: ").strip()


# -- looks -------------------------------------------------------------------------------------


def test_no_line_of_a_table_is_wider_than_80_columns(call, root):
    write(
        root,
        {
            LAYERS: layers(
                "custom_quant_type = 'a'\ncustom_quant_type = f()\nmm(custom_quant_type)\n"
            ),
            ATTENTION: attention("custom_quant_type = 'a'\nmm(query, key)\nmm(key, value)\n"),
        },
    )
    _, out, _ = call("--check")
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_without_tree_it_is_the_projects_own(monkeypatch, root, capfd):
    monkeypatch.setattr(Project, "tree", property(lambda self: root))
    assert cli.main(["--check"]) == 0
    assert str(root) in capfd.readouterr().out


def test_a_relative_tree_is_taken_from_the_working_folder(call, root, monkeypatch):
    monkeypatch.chdir(root.parent)
    code, out, _ = call("--pv-quant none", tree=os.path.relpath(root))
    assert code == 0
    assert f"--restore --tree {root.name}" in out
    assert modifier.check(root).sites[-1].was == "bf16"
