import pytest
from mqo.errors import DataError, MqoError
from mqo.sweep import cells


def jobs(models="llama32-1b", datasets="wikipedia", modes="bf16", training="tiny", **rest):
    return cells.jobs(models, datasets, modes, training, **rest)


def test_all_by_all_by_the_modes_of_the_scripts_are_sixty():
    made = jobs("all", "all", None)
    assert len({job.name for job in made}) == len({job.digest for job in made}) == 60
    assert {job.config.experiment.training.name for job in made} == {"tiny"}


def test_each_seed_is_a_run_with_the_flag_last():
    made = jobs(seeds=(1, 2, 1), extra_flags=("--lr", "1"))
    assert [job.name.rpartition("_")[2] for job in made] == ["seed1", "seed2"]
    assert [job.config.experiment.extra_flags for job in made] == [
        ("--lr", "1", "--seed", "1"),
        ("--lr", "1", "--seed", "2"),
    ]


def test_neighbors_write_the_index_of_different_datasets():
    first, second, third, _ = jobs(datasets="all", modes="bf16,FA_mxfp8")
    assert first.data_key != second.data_key
    assert first.data_key == third.data_key


def test_all_bad_cells_are_named_before_any_is_started():
    good, bad = jobs(), jobs("llama*", extra_flags=("--seq-length", "65"))
    cells.check(good)
    with pytest.raises(MqoError, match="2 of 3 cells cannot run") as error:
        cells.check([*good, *bad])
    named = [line.partition(": ")[0] for line in error.value.detail.splitlines()]
    assert named == [job.name for job in bad]
    assert error.value.detail.count("Sequences of 65 tokens") == 2


def test_what_ails_all_cells_is_said_once():
    with pytest.raises(DataError, match="No data was given for wikipedia") as error:
        cells.check(jobs(modes="bf16,mxfp8", training="fast"))
    assert not error.value.detail
