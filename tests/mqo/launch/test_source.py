"""Which source a run takes: a snapshot with its types, or what was patched by hand, if it fits."""

import pytest
from mqo.errors import EditedError, OverlayError
from mqo.launch.config import resolve
from mqo.launch.source import (
    DISTILLER,
    PROGRAM,
    ready_checkout,
    source_diff,
    take_source,
)
from mqo.quant.recipe import Recipe
from mqo.runs import RunFolder

from ..conftest import contents
from ..overlay.quant_types import lookalike

# What lookalike's source says: its 'bf16' is no type, and so means none.
SAID = {"fprop": "hifp8", "dgrad": "mxfp8", "wgrad": "none", "qk": "mxfp4", "pv": "none"}


def cell(quantization="bf16", types=None, **rest):
    made = resolve("llama32-1b", "wikipedia", quantization, "smoke", **rest)
    asked = made.quantization.model_copy(update={"types": types})
    return made.model_copy(update={"quantization": asked}) if types else made


@pytest.fixture
def by_hand(tmp_path):
    root = tmp_path / "by hand"
    files = {lookalike.LAYERS: lookalike.layers(), lookalike.ATTENTION: lookalike.attention()}
    return lookalike.write(root, files | {PROGRAM: "train()\n"})


@pytest.fixture
def checkout(patched):
    (patched.tree.root / PROGRAM).write_text("train()\n")
    return patched


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


# -- patched by mqo --------------------------------------------------------------------------------


def test_a_patched_checkout_is_copied_with_the_types_and_stays_as_it_is(checkout, folder):
    wanted = cell(types={"fprop": "mxfp8", "dgrad": "none"}, megatron=checkout.tree.root)
    before = contents(checkout.tree.root)
    tree = ready_checkout(wanted, wanted.placement.megatron, allow_edits=False)
    shot = take_source(folder, tree, checkout.series, wanted)
    assert shot.tree.root == folder.source
    assert dict(shot.types) == {"fprop": "mxfp8", "dgrad": "none"}
    assert (folder.source / PROGRAM).read_text() == "train()\n"
    assert "+        custom_quant_type = 'mxfp8'\n" in folder.overlay_diff.read_text()
    assert contents(checkout.tree.root) == before


def test_a_checkout_edited_by_hand_is_refused_unless_that_is_allowed(checkout):
    checkout.edit("core/layers.py", b"trailing words", b"mine")
    given = checkout.tree.root
    with pytest.raises(EditedError, match=r"core/layers\.py"):
        ready_checkout(cell(), given, allow_edits=False)
    assert ready_checkout(cell(), given, allow_edits=True).root == given


def test_a_tree_without_a_program_is_no_full_checkout(patched):
    with pytest.raises(OverlayError, match=rf"{patched.tree.root} .*pretrain_gpt\.py"):
        ready_checkout(cell(), patched.tree.root, allow_edits=False)


def test_a_run_without_the_program_that_distills_is_refused(checkout, folder):
    types = {"fprop": "none", "dgrad": "none"}
    wanted = cell(types=types, megatron=checkout.tree.root, teacher=checkout.tree.root)
    tree = ready_checkout(wanted, checkout.tree.root, allow_edits=False)
    with pytest.raises(OverlayError, match=DISTILLER):
        take_source(folder, tree, checkout.series, wanted)


def test_an_unpatched_checkout_is_refused(by_hand):
    for path in (lookalike.LAYERS, lookalike.ATTENTION):
        (by_hand / path).write_text("x = 1\n")
    with pytest.raises(OverlayError, match=rf"{by_hand}: .*`mqo apply --tree"):
        ready_checkout(cell(), by_hand, allow_edits=False)


def test_the_diff_holds_the_lines_that_the_snapshot_would_change(checkout):
    checkout.edit("core/layers.py", b"custom_quant_type = 'none'\n        fprop", b"x = 0")
    checkout.edit("core/layers.py", b"x = 0", b"custom_quant_type = 'mxfp4'\n        fprop")
    lines = source_diff(checkout.tree, {"fprop": "mxfp8"}).splitlines()
    changes = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    line = " " * 8 + "custom_quant_type = "
    assert changes == [f"-{line}'mxfp4'", f"+{line}'mxfp8'"]
    assert source_diff(checkout.tree, {"fprop": "mxfp4"}) == ""
    assert source_diff(checkout.tree, None) == ""


def test_sites_made_by_hand_next_to_those_of_the_patches_are_refused(checkout, monkeypatch):
    monkeypatch.setattr("mqo.launch.source.files_by_hand", lambda tree: ["core/layers.py"])
    with pytest.raises(OverlayError, match=r"mqo restore .*mqo adopt"):
        ready_checkout(cell(), checkout.tree.root, allow_edits=True)


# -- patched by other means ------------------------------------------------------------------------


@pytest.mark.parametrize("types", [SAID, None], ids=["these types", "source"])
def test_a_tree_patched_by_hand_is_run_where_it_stands_if_it_says_the_types(by_hand, folder, types):
    wanted = cell("source", types=types, megatron=by_hand)
    before = contents(by_hand)
    tree = ready_checkout(wanted, by_hand, allow_edits=False)
    shot = take_source(folder, tree, None, wanted)
    assert (shot.tree.root, dict(shot.types)) == (by_hand, SAID)
    assert not folder.source.exists()
    assert contents(by_hand) == before


def test_types_that_it_does_not_say_are_refused_with_the_command_that_sets_them(by_hand):
    with pytest.raises(OverlayError) as error:
        ready_checkout(cell("linear_mxfp8", megatron=by_hand), by_hand, allow_edits=False)
    assert "fprop = hifp8, dgrad = mxfp8, qk = mxfp4" in error.value.found
    assert error.value.expected == "fprop = mxfp8, dgrad = none, qk = none"
    options = "--linear-quant mxfp8 --dgrad-quant none --qk-quant none"
    assert f"--tree '{by_hand}' {options}`" in error.value.help


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": ("x",)},
        {"block": 16},
        {"every": 0},
        {"dump": (1,)},
        {"schedule": ("qk: mxfp8",)},
        {"keep_checkpoints": 2},
        {"check_nan": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_nothing_there_would_heed_are_refused(by_hand, options):
    with pytest.raises(OverlayError, match=r"options except the types"):
        ready_checkout(cell("source", **options), by_hand, allow_edits=False)


def test_a_recipe_that_nothing_there_would_heed_is_refused(by_hand):
    recipe = Recipe(name="own", summary="", source="", types={"fprop": "hifp8", "dgrad": "mxfp8"})
    wanted = cell("FA_mxfp4", recipe=recipe, megatron=by_hand)
    assert wanted.quantization.types == SAID
    with pytest.raises(OverlayError, match=r"options except the types"):
        ready_checkout(wanted, by_hand, allow_edits=False)
