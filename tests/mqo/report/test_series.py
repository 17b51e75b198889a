"""Series of fewer points, and bands of several runs."""

import math

from mqo.report.series import Band, band, downsample


def test_a_point_is_the_mean_of_its_steps_at_the_last_of_them():
    series = [(step, float(step)) for step in range(1, 8)]
    assert downsample(series, 3) == [(3, 2.0), (6, 5.0), (7, 7.0)]
    assert downsample(series, 7) == series


def test_a_band_is_of_the_steps_that_all_runs_have():
    found = band([[(1, 2.0), (2, 4.0)], [(2, 6.0), (3, 9.0)]])
    assert found == Band(steps=(2,), mean=(5.0,), low=(4.0,), high=(6.0,))
    assert band([[(1, 2.0)], []]) == band([]) == Band()


def test_each_run_is_thinned_before_the_range_is_taken():
    """So that the band is that of the seeds, and not of single steps."""
    one, other = ([(n, n % 2 + more) for n in range(8)] for more in (0.0, 0.25))
    found = band([one, other], 2)
    assert found.low == (0.5, 0.5)
    assert found.high == (0.75, 0.75)


def test_where_a_run_is_not_finite_there_is_no_band():
    found = band([[(1, 1.0), (2, math.nan)], [(1, 3.0), (2, 3.0)]])
    assert found.mean[0] == 2.0
    assert all(map(math.isnan, (found.mean[1], found.low[1], found.high[1])))
