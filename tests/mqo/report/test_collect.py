"""Run folders as records: what counts as ended well, and what the others say."""

import json

import pytest
from mqo.errors import RunError
from mqo.report.collect import collect, find
from mqo.sweep.state import Entry, SweepFolder

from .conftest import write


def only(runs):
    (run,), left_out = collect([runs.root])
    assert left_out == []
    return run


def reasons(runs):
    found, left_out = collect([runs.root])
    assert found == []
    return [(one.name, one.what, one.reason) for one in left_out]


# -- which folders -------------------------------------------------------------------------------


def test_a_run_a_folder_of_runs_and_a_sweep_are_found_once(runs):
    runs("sweeps/a sweep/one")
    runs("two")
    places = [runs.root, runs.root / "sweeps", runs.root / "two"]
    assert [run.root.name for _, run in find(places)] == ["one", "two"]


def test_runs_of_one_name_in_two_places_are_told_apart(runs):
    runs("a/run")
    runs("b/run")
    names = [name for name, _ in find([runs.root / "a", runs.root / "b"])]
    assert names == ["a/run", "b/run"]


def test_a_run_keeps_what_lies_in_it_to_itself(runs):
    run = runs("one")
    (run.source / "cell.json").write_text("{}")
    assert len(find([run.root])) == 1


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_place_without_runs_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=name):
        find([tmp_path / name])


# -- a run that ended well -----------------------------------------------------------------------


def test_a_seed_has_either_spelling(runs):
    runs("one", flags=("--seed=7",))
    assert only(runs).seed == "7"


def test_a_run_says_what_ran_and_what_it_took(runs):
    runs("one", "FA_linear_mxfp8", loss=6.0, step_s=0.25, memory=2**31)
    run = only(runs)
    assert (run.model, run.dataset, run.config, run.variant) == (
        *("llama32-1b", "wikipedia", "smoke"),
        "FA_linear_mxfp8",
    )
    assert (run.seed, run.steps, run.tokens_per_step) == ("1234", 200, 4 * 256)
    assert run.tokens_per_s == 4 * 256 / 0.25
    assert run.peak_memory == 2**31  # of the largest process
    assert run.share == 0.33
    assert (run.upstream, run.commit, run.python) == ("0.19.2", "abc+", "3.11.9")
    assert run.machine.line() == "A CPU, 2 cores, 2 threads"


def test_the_median_step_leaves_the_first_steps_out(runs):
    folder = runs("one", steps=5)
    times = {2: 60.0, 3: 9.0, 4: 1.0, 5: 3.0}
    rows = [{"iteration": n, "name": "iteration-time", "value": s} for n, s in times.items()]
    rows += [{"iteration": 5, "name": "lm loss", "value": 7.0}]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert only(runs).step_time == 2.0


def test_the_last_validation_of_a_step_counts(runs):
    folder = runs("one", steps=5, valid=7.5)
    with folder.metrics.open("a") as lines:
        lines.write('{"iteration": 5, "name": "lm loss validation", "value": 7.25}\n')
    assert only(runs).valid == [(5, 7.25)]


def test_layers_that_were_left_out_have_no_underflow(runs):
    folder = runs("one", "linear_mxfp8")
    stats = json.loads(folder.quant_stats.read_text())
    left_out = stats[0] | {"quant_type": "excluded", "signal": 0.0, "noise": 0.0}
    folder.quant_stats.write_text(json.dumps([*stats, left_out]))
    (run,), _ = collect([runs.root])
    assert [(one.quant_type, one.underflow) for one in run.sites] == [
        ("excluded", None),
        ("mxfp8", 0.02),
    ]


def test_a_site_adds_up_energies_and_averages_underflow(runs):
    folder = runs("one", "linear_mxfp4")
    base = {"site": "fprop", "quant_type": "mxfp4", "operand": "x", "calls": 2, "measured": 1}
    rows = [base | {"layer": name, "signal": 100.0, "noise": n} for name, n in (("a", 1), ("b", 3))]
    write(folder.quant_stats, rows)
    with folder.metrics.open("a") as lines:
        lines.write('{"iteration": 1, "name": "quant/fprop/b/x/underflow", "value": 0.04}\n')
    (site,) = only(runs).sites
    assert (site.layers, site.calls) == (2, 4)
    assert site.sqnr_db == pytest.approx(16.9897, abs=1e-4)  # 10 log10(200 / 4)
    assert site.underflow == pytest.approx(0.03)


def test_options_of_the_quantizers_make_a_variant(runs):
    folder = runs("one", "mxfp4", gemms="all")
    text = folder.quant_config.read_text()
    folder.quant_config.write_text(text + '[quantizer]\nblock = 64\n[layers]\nexclude = ["out*"]\n')
    assert only(runs).variant == "mxfp4, all GEMMs, block 64, without out*"


def test_types_in_attentions_backward_pass_make_a_variant(runs):
    runs("one", "qk_pv_mxfp4", attention_gemms="all")
    assert only(runs).variant == "qk_pv_mxfp4, all attention GEMMs"


def test_what_quantizes_nothing_has_no_variants(runs):
    """A sweep gives --gemms and --exclude to all its runs, the unquantized ones among them."""
    folder = runs("one", gemms="all")
    text = folder.quant_config.read_text()
    folder.quant_config.write_text(text + '[layers]\nexclude = ["output_layer"]\n')
    run = only(runs)
    assert (run.variant, run.label) == ("bf16", "bf16 (unquantized)")


def test_a_diff_is_taken_apart_by_file(runs):
    runs("one", "FA_mxfp8")
    site, added = only(runs).changes
    assert (site.path, site.kind) == ("megatron/core/layers.py", "site")
    assert (site.added, site.removed) == (2, 1)
    assert (added.path, added.kind) == ("megatron/ours.py", "added")
    assert (added.added, added.removed) == (1, 0)


def test_an_older_run_lacks_what_it_did_not_record(runs):
    folder = runs("one")
    for path in (folder.device, folder.coverage, folder.quant_stats, folder.overlay_diff):
        path.unlink()
    run = only(runs)
    assert (run.peak_memory, run.share, run.sites, run.changes) == (None, None, (), ())


# -- the others ----------------------------------------------------------------------------------


def test_a_failed_run_is_listed_with_its_words(runs):
    folder = runs("one")
    folder.result.unlink()
    folder.failure.write_text("GuardError: qk never ran\n")
    assert reasons(runs) == [("one", "failed", "GuardError: qk never ran")]


def test_a_student_without_a_loss_on_its_text_is_left_out(runs):
    folder = runs("one")
    folder.metrics.write_text(folder.metrics.read_text().replace('"lm loss"', '"kd loss"'))
    ((name, why, words),) = reasons(runs)
    assert (name, why) == ("one", "without a loss on its text")
    assert "only from a teacher" in words


def test_an_unfinished_run_says_how_far_it_came(runs):
    folder = runs("one", steps=50)
    folder.result.unlink()
    folder.log.write_text("loading\nlast words\n")
    assert reasons(runs) == [("one", "unfinished", "step 50 of 50; last message: last words")]


def test_a_node_without_losses_is_part_of_a_run(runs):
    folder = runs("one")
    write(folder.result, json.loads(folder.result.read_text()) | {"train_loss": None})
    assert reasons(runs)[0][1] == "part of a run"


@pytest.mark.parametrize(("steps", "left_out"), [(0, ["a final validation"]), (50, [])])
def test_a_run_that_only_validated_is_in_no_comparison(runs, steps, left_out):
    folder = runs("one")
    write(folder.ended, {"steps": steps})
    assert [other.what for other in collect([folder.root])[1]] == left_out


@pytest.mark.parametrize("name", ["cell.json", "result.json", "environment.json"])
def test_a_torn_file_is_no_reason_to_stop(runs, name):
    folder = runs("one")
    (folder.root / name).write_text('{"model": ')
    assert reasons(runs)[0][:2] == ("one", "unreadable")


def test_a_run_that_a_sweep_has_not_begun_is_listed(runs):
    runs("a sweep/one")
    place = SweepFolder(runs.root / "a sweep")
    entries = [Entry("one", "0", "done", run="one"), Entry("two", "0")]
    place.write({entry.name: entry for entry in entries})
    _, left_out = collect([runs.root])
    assert [(one.name, one.what) for one in left_out] == [("two", "not started")]
