"""What a run leaves behind in its folder, and the guard that ends a run that quantizes nothing.

The run folder is where quant.toml lies (MQO_QUANT_CONFIG). Without one, nothing here does anything.
"""

from .checkpoints import CheckpointError, before_load, before_save, to_verify
from .divergence import DivergenceError, check_finite_loss, end_if_diverged
from .files import run_folder
from .guard import GuardError, after_step, before_model, before_step, before_validation
from .implementation import ImplementationError, check_available
from .profiler_ranges import label_timers
from .record import recorded
from .resumed_schedule import check_schedule
from .resumed_types import note_checkpoint
from .saved_args import checked_arguments
from .unpickle import protect

# Every program that reads a checkpoint imports this package before.
protect()
