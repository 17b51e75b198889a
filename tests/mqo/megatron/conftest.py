"""A process group of this process alone, and fresh options and records for every test."""

import pytest
import torch

from ...fresh_options import fresh_state as fresh_state
from ...fresh_options import options as options
from ...process_groups import no_group_left as no_group_left
from ...process_groups import one_rank as one_rank

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def groups(one_rank):
    """Megatron's groups, each of this process alone, and its random states."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
