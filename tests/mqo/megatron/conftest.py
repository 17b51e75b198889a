"""A process group of this process alone, and fresh options and records for every test."""

import torch

from ...fresh_options import fresh_state as fresh_state
from ...fresh_options import options as options
from ...process_groups import no_group_left as no_group_left
from ...process_groups import one_rank as one_rank

torch.set_num_threads(1)
