"""How real runs fail, under torchrun itself: what their user reads."""

import pytest
from mqo.errors import RunError
from mqo.launch.config import Cluster

from .real_runs import TINY

# So long a first step that the weights are no longer finite behind it.
FAR = ("--lr", "1e18", "--min-lr", "0", "--clip-grad", "0", "--micro-batch-size", "4")


@pytest.mark.slow
def test_a_run_that_diverges_says_where_and_all_ranks_end(start, fresh):
    with pytest.raises(RunError) as error:
        start("FA_linear_mxfp8", flags=(*TINY, *FAR), cluster=Cluster(nproc_per_node=2))
    assert error.value.exit_code == 1
    found = error.value.found
    assert "DivergenceError: NaN in the loss of rank 0 and 1 more in step 3" in found
    assert "step 1: loss 8." in found
    assert "--check-nan" in found
