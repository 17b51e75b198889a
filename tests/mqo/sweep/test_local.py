import pytest
from mqo.errors import MqoError
from mqo.launch.machine import Machine
from mqo.runs import RunFolder
from mqo.sweep.local import command, shares


@pytest.mark.parametrize(
    ("cores", "jobs", "processes", "runs", "count", "threads"),
    [
        (8, None, 1, 60, 8, "1"),
        (8, None, 1, 2, 2, "4"),
        (8, 3, 1, 60, 3, "2"),
        (8, 2, 2, 60, 2, "2"),
        (2, None, 4, 60, 1, "1"),
    ],
)
def test_jobs_share_the_cores(cores, jobs, processes, runs, count, threads):
    made = shares(Machine(cores, 0), jobs, processes, runs, {})
    assert made == [{"OMP_NUM_THREADS": threads}] * count


@pytest.mark.parametrize(
    ("visible", "processes", "expected"),
    [
        ("", 1, ["0", "1", "2", "3"]),
        ("", 2, ["0,1", "2,3"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
    ],
)
def test_jobs_have_gpus_of_their_own(visible, processes, expected):
    made = shares(Machine(16, 4), None, processes, 60, {"CUDA_VISIBLE_DEVICES": visible})
    assert [share["CUDA_VISIBLE_DEVICES"] for share in made] == expected
    assert {share["OMP_NUM_THREADS"] for share in made} == {"4"}


@pytest.mark.parametrize(
    ("machine", "jobs", "processes", "text"),
    [
        (Machine(2, 0), 3, 1, "3 jobs of 1 .*3 cores.* 2 jobs"),
        (Machine(16, 4), 3, 2, "3 jobs of 2 .*6 GPUs.* 2 jobs"),
        (Machine(16, 1), None, 2, "1 jobs of 2 .*2 GPUs.* 0 jobs"),
    ],
)
def test_more_than_there_is_room_for_is_refused(machine, jobs, processes, text):
    with pytest.raises(MqoError, match=text):
        shares(machine, jobs, processes, 60, {})


def test_a_job_is_told_its_tracker_beside_its_folder(tmp_path):
    run = RunFolder(tmp_path)
    assert command(run, "mlflow") == [*command(run), "mlflow"]
