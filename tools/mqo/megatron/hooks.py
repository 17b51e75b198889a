"""Functions that patched Megatron and the training programs call around steps and checkpoints.

The folder of a run is that of its quant.toml (MQO_QUANT_CONFIG). Without it hooks do nothing.
"""

from mqo.megatron.run.checkpoints import before_load, before_save, to_verify
from mqo.megatron.run.divergence import check_finite_loss, end_if_diverged
from mqo.megatron.run.gpt_checkpoint import layer_maps, retarget
from mqo.megatron.run.guard import after_step, before_model, before_step, before_validation
from mqo.megatron.run.implementation import check_available
from mqo.megatron.run.profiler_ranges import label_timers
from mqo.megatron.run.record import recorded
from mqo.megatron.run.resumed_schedule import check_schedule
from mqo.megatron.run.resumed_types import note_checkpoint
from mqo.megatron.run.saved_args import checked_arguments
