"""Forks whose hand-made sites are replaced: releases with sites in words of our own."""

import ast
import functools
import subprocess

import pytest
from mqo.cli import app
from mqo.commands import adopt as command
from mqo.errors import EditedError, OverlayError
from mqo.overlay import apply as overlay
from mqo.overlay.checkout import git
from mqo.overlay.pin import Pin
from mqo.overlay.quant_types import modifier
from mqo.overlay.quant_types.adopt import BRANCH, adopt, planned
from mqo.overlay.quant_types.sites import ATTENTION, LAYERS
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.overlay.vendor import release
from mqo.project import Project

from ...conftest import contents
from ..conftest import commit_all

PROJECT = Project.here()
WHOLE = Series.of_project(PROJECT)
SERIES = WHOLE.only(WHOLE.with_required(["quant_sites"]))  # takes a fifth of the time
RELEASES = pytest.mark.parametrize("files", ["0.14.0", "0.17.1", "0.19.2"], indirect=True)
LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
# The sites of a fork: its file, the name that the GEMM's statement assigns, and the type.
SITES = [
    (LAYERS, "output", "mxfp8"),
    (ATTENTION, "matmul_result", "mxfp4"),
    (ATTENTION, "context", "hifp8"),
]
TYPES = {"fprop": "mxfp8", "dgrad": "none", "wgrad": "none", "qk": "mxfp4", "pv": "hifp8"}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_git")]


def chain(text, target, operands, quant_type):
    """A site around the statement `text`, which assigns to `target`."""
    space = text[: len(text) - len(text.lstrip())]
    rows = [
        "from made.here import made_matmul",
        f"custom_quant_type = {quant_type!r}",
        "if custom_quant_type == 'mxfp6':",
        f"    {target} = made_matmul(6, {operands})",
        f"elif custom_quant_type == {quant_type!r}:",
        f"    {target} = made_matmul(4, {operands})",
        "else:",
    ]
    inner = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    return "".join(f"{space}{row}\n" for row in rows) + inner


def by_hand(content, target, quant_type):
    """The file, with a site around the last statement that assigns a product to `target`."""
    lines = content.decode().splitlines(keepends=True)
    assigned = [
        node
        for node in ast.walk(ast.parse(content))
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == target
        and ast.unparse(node.value).startswith(("torch.matmul(", "torch.baddbmm(", "torch.bmm("))
    ]
    node = assigned[-1]  # a class of frozen weights comes first
    operands = ", ".join(map(ast.unparse, [*node.value.args, *node.value.keywords]))
    span = slice(node.lineno - 1, node.end_lineno)
    lines[span] = [chain("".join(lines[span]), target, operands, quant_type)]
    return "".join(lines).encode()


@functools.cache
def files_of(version):
    return release(Pin.load(PROJECT.upstream_pin), version, PROJECT.cache, print)


@pytest.fixture(params=["0.19.2"])
def files(request):
    """{path: content} of a release."""
    return files_of(request.param)


@pytest.fixture
def fork(files, tmp_path):
    """A function that makes a git work tree of the release, with sites and more changes."""

    def make(change=None):
        root = tmp_path / "a fork"
        changed = dict(files)
        for path, target, quant_type in SITES:
            changed[path] = by_hand(changed[path], target, quant_type)
        changed |= change(files) if change else {}
        for path, content in changed.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        commit_all(root)
        return root

    return make


def sources(root):
    return contents(root / "megatron")


def types(root):
    return {state.site.name: state.type for state in modifier.check(root).sites}


@RELEASES
def test_sites_are_replaced_with_their_types_and_come_back_byte_for_byte(files, fork):
    root = fork()
    before = sources(root)
    plan = planned(Tree(root), SERIES)
    assert plan.types == TYPES
    assert plan.contents == {path: files[path] for path in (LAYERS, ATTENTION)}
    assert sources(root) == before
    outcome = adopt(Tree(root), SERIES)
    assert types(root) == TYPES
    assert all(state.site.bound for state in modifier.check(root).sites)
    assert "made_matmul(4, " not in (root / ATTENTION).read_text()
    overlay.restore(Tree(root), SERIES)
    for words in outcome.undo[1:]:
        subprocess.run(words, shell=True, check=True, capture_output=True)
    assert sources(root) == before
    assert planned(Tree(root), SERIES).types == TYPES


def test_the_command_shows_what_it_does_and_does_it_with_yes(fork, capsys, monkeypatch):
    monkeypatch.setattr(command, "patch_series", lambda: SERIES)
    root = fork()
    before = sources(root)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            app(["adopt", "--tree", str(root), *words])
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    shown = run()
    assert f"{LAYERS}\n" in shown
    assert "fprop  mxfp8" in shown
    assert sources(root) == before
    assert f"branch -D {BRANCH}" in run("--yes")
    assert types(root) == TYPES


def with_copy(files, extra=""):
    """The layers, with a copy of the class that holds the site, and that is applied."""
    text = files[LAYERS].decode()
    (node,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == LINEAR)
    code = "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
    sited = by_hand(code.replace(LINEAR, "Made").encode(), "output", "mxfp4").decode()
    sited = sited.replace("return output", f"{extra}return output")
    return {LAYERS: f"{text.replace(f'{LINEAR}.apply', 'Made.apply')}\n\n{sited}".encode()}


@pytest.mark.parametrize("files", ["0.14.0", "0.19.2"], indirect=True)
def test_a_copy_of_the_class_is_replaced(fork):
    root = fork(with_copy)
    adopt(Tree(root), SERIES)
    assert types(root) == TYPES | {"fprop": "mxfp4"}
    assert "class Made" not in (root / LAYERS).read_text()


def test_a_copy_that_differs_elsewhere_is_refused_with_the_difference(fork):
    root = fork(lambda files: with_copy(files, "output = output + 0\n        "))
    before = sources(root)
    with pytest.raises(OverlayError, match=rf"layers\.py:\d+ Made .*{LINEAR}") as error:
        adopt(Tree(root), SERIES)
    assert "+        output = output + 0" in error.value.detail
    assert sources(root) == before


def test_a_changed_file_a_patched_tree_and_an_earlier_adoption_are_refused(fork):
    root = fork()
    original = (root / LAYERS).read_bytes()
    (root / LAYERS).write_bytes(original + b"# mine\n")
    with pytest.raises(EditedError, match=r"layers\.py"):
        adopt(Tree(root), SERIES)
    (root / LAYERS).write_bytes(original)
    adopt(Tree(root), SERIES)
    with pytest.raises(OverlayError, match=f"mqo restore .* switch -`, .*branch -D {BRANCH}"):
        adopt(Tree(root), SERIES)
    subprocess.run(["git", "-C", root, "branch", "-m", "kept"], check=True)
    with pytest.raises(OverlayError, match="patched by `mqo apply`"):
        adopt(Tree(root), SERIES)


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (overlay, "apply", OverlayError("no space")),
        (modifier, "modify", KeyboardInterrupt()),
    ],
    ids=["apply", "modify"],
)
def test_a_step_that_fails_leaves_the_tree_and_its_branch(fork, monkeypatch, module, name, error):
    def fail(*words):
        raise error

    root = fork()
    before = sources(root)
    monkeypatch.setattr(module, name, fail)
    with pytest.raises(type(error)):
        adopt(Tree(root), SERIES)
    assert sources(root) == before
    assert git(root, "for-each-ref", "--format=%(refname:short)") == b"main\n"
    assert git(root, "rev-parse", "--abbrev-ref", "HEAD") == b"main\n"
    assert git(root, "status", "--porcelain") == b""


def test_a_tree_without_sites_and_one_without_git_are_refused(files, fork, tmp_path):
    root = fork(lambda files: {path: files[path] for path in (LAYERS, ATTENTION)})
    with pytest.raises(OverlayError, match="mqo apply"):
        planned(Tree(root), SERIES)
    with pytest.raises(OverlayError, match="git work tree"):
        planned(Tree(tmp_path), SERIES)


def test_a_type_that_is_not_known_is_refused(files, fork):
    content = by_hand(files[LAYERS], "output", "fp7")
    with pytest.raises(OverlayError, match=r"layers\.py:\d+ .*fp7"):
        planned(Tree(fork(lambda files: {LAYERS: content})), SERIES)
