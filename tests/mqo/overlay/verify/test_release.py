import pytest
from mqo.overlay.apply import AlreadyPristine
from mqo.overlay.verify import release as module

from ..conftest import GEMMS, PLAIN, release

pytestmark = pytest.mark.slow

SITE_PATCH = "patches/quant_sites.py"
PROGRAM = "Megatron-LM/tools/verify_forward.py"


def outcomes(result):
    return {entry.name: (entry.outcome, entry.files) for entry in result.entries}


def red(result, *words):
    """The release is not green, and one fault says all of `words`."""
    assert not result.green
    assert any(all(word in fault for word in words) for fault in result.faults), result.faults


# -- green -------------------------------------------------------------------------------------

ALL = {"ours": ("applied", 1), "quant_sites": ("applied", 1), "new_engine": ("applied", 1)}


def test_an_entry_that_finds_nothing_or_is_for_other_releases_is_not_needed(trial):
    trial.put_wheel("1.2.3", {**release("1.2.3"), PLAIN: b"answer = 42\n"})
    trial.change("patches/series.toml", 'upstream = ">=1"', 'upstream = ">=1.3"')
    result = trial.verify()
    assert outcomes(result)["new_engine"] == ("not needed", 0)
    assert outcomes(result)["ours"] == ("not needed", 0)
    assert result.green


def test_a_release_on_which_everything_holds_is_green_and_the_project_stays_as_it_is(trial):
    def files():
        paths = trial.project.root.rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    before = files()
    result = trial.verify()
    assert outcomes(result) == ALL
    assert (result.version, result.forward, result.faults) == ("1.2.3", "run", ())
    assert result.green
    assert {p: c for p, c in files().items() if "__pycache__" not in p.parts} == before


# -- drift -------------------------------------------------------------------------------------


def test_a_wrong_anchor_is_drift_with_a_report_and_the_other_entries_are_still_tried(trial):
    trial.change(SITE_PATCH, "left @ right", "left @ rights")
    result = trial.verify()
    assert not result.green
    assert outcomes(result) == {**ALL, "quant_sites": ("drifted", 0)}
    (why,) = [entry.why for entry in result.entries if entry.why]
    for part in (
        f"{GEMMS}, in fprop: `left @ rights` occurs 0 times instead of 1",
        f"nearest: {GEMMS}:5 `left @ right`",
        "known good: megatron-core >=1,<2",
    ):
        assert part in why
    assert result.forward == "not tried"
    assert result.faults == ()


def test_a_codemod_that_leaves_something_is_drift_at_upstreams_line(trial):
    trial.change("patches/new_engine.py", '"new_engine")', '"old_engine")')
    result = trial.verify()
    assert not result.green
    assert outcomes(result)["new_engine"] == ("drifted", 0)
    assert f"{PLAIN}:3 old_engine" in result.entries[2].why


def test_a_file_that_is_gone_is_drift(trial):
    files = release("1.2.3")
    files["megatron/core/moved/gemms.py"] = files.pop(GEMMS)
    trial.put_wheel("1.2.3", files)
    result = trial.verify()
    assert not result.green
    assert f"holds no {GEMMS}; nearest: megatron/core/moved/gemms.py" in result.entries[1].why


def test_a_release_outside_the_supported_range_is_tried_and_not_green(trial):
    trial.change("patches/series.toml", 'supported = ">=1,<2"', 'supported = ">=1.2,<2"')
    result = trial.verify("1.1.0")
    assert outcomes(result) == ALL
    assert result.forward == "run"
    red(result, "1.1.0 is outside `supported`", ">=1.2,<2", "widen it")


# -- source ------------------------------------------------------------------------------------


def test_a_patch_that_uses_a_name_which_the_release_does_not_have_is_red(trial):
    trial.change(SITE_PATCH, "custom_quant_type)", "custom_quant_type, weight)")
    red(trial.verify(), f"{GEMMS} uses weight once patched, without binding it")


# -- restore -----------------------------------------------------------------------------------


def test_a_restore_that_does_nothing_is_red(trial, monkeypatch):
    monkeypatch.setattr(module, "restore", lambda tree, series: AlreadyPristine())
    result = trial.verify()
    for path in (PLAIN, GEMMS):
        red(result, f"{path} differs from the wheel's after restore")
    red(result, "counts as patched")


def test_a_restore_that_refuses_is_red(trial, monkeypatch):
    apply = module.apply

    def apply_and_edit(tree, series):
        apply(tree, series)
        (tree.root / PLAIN).write_text("mine = 1\n")

    monkeypatch.setattr(module, "apply", apply_and_edit)
    red(trial.verify(), "restore refused", PLAIN, "changed by hand")


# -- forward -----------------------------------------------------------------------------------


def test_a_program_that_fails_is_red_with_its_last_words(trial):
    trial.change(PROGRAM, "import re", "raise ValueError('a shape is off')\nimport re")
    result = trial.verify()
    assert result.forward == "failed"
    red(result, "ValueError: a shape is off")


def test_a_program_that_reports_nothing_is_red(trial):
    trial.change(PROGRAM, "import re", "import re, os; os._exit(0)\nimport re")
    red(trial.verify(), "ended without a result")


def test_a_model_that_quantizes_nothing_is_red(trial):
    trial.change(PROGRAM, 'if kind != "none"', "if False")
    result = trial.verify()
    assert result.forward == "failed"
    red(result, "at mxfp8: fprop of layer quantized 0 operands once, not 2")


def test_a_source_that_lacks_a_site_is_red(trial):
    trial.change(SITE_PATCH, ", 'pv')", ",)")
    result = trial.verify()
    assert result.forward == "failed"
    red(result, "'pv'")


def test_a_missing_package_is_compiled_only_which_is_enough_but_for_the_pinned_release(trial):
    trial.change(PROGRAM, "facts |=", "facts = {'lacks': 'torch'}; dict() | ")
    other, pinned = trial.verify("1.1.0"), trial.verify("1.2.3")
    assert other.forward == pinned.forward == "compiled only"
    assert (other.lacks, other.faults) == ("torch", ())
    assert other.green
    assert not pinned.green


# -- wheels ------------------------------------------------------------------------------------


def test_a_wheel_that_cannot_be_had_is_an_error_of_that_release(trial):
    trial.drop_wheel("1.1.0")
    result = trial.verify("1.1.0")
    assert "pip could not download megatron-core==1.1.0" in result.error
    assert {outcome for outcome, _ in outcomes(result).values()} == {"not tried"}
    assert not result.green


def test_a_wheel_of_another_hash_is_an_error_of_that_release(trial):
    path = trial.project.cache / "wheels/megatron_core-1.1.0-cp311-cp311-any.whl"
    path.write_bytes(path.read_bytes() + b" ")
    result = trial.verify("1.1.0")
    assert result.error and not result.green


def test_a_wheel_that_says_another_version_is_red(trial):
    trial.put_wheel("1.1.0", release("1.1.1"))
    red(trial.verify("1.1.0"), "the wheel of 1.1.0 says that it is 1.1.1")
