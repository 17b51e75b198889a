"""Curves of fewer points, and of several runs."""

from mqo.report.downsample import downsample, mean


def test_a_point_is_the_mean_of_its_steps_at_the_last_of_them():
    series = [(step, float(step)) for step in range(1, 8)]
    assert downsample(series, 3) == [(3, 2.0), (6, 5.0), (7, 7.0)]
    assert downsample(series, 7) == series


def test_a_mean_is_of_the_steps_that_all_runs_have():
    assert mean([[(1, 2.0), (2, 4.0)], [(2, 6.0), (3, 9.0)]]) == [(2, 5.0)]
    assert mean([[(1, 2.0)], []]) == []
