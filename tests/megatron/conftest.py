"""A process group of this process alone."""

from ..process_groups import no_group_left as no_group_left
from ..process_groups import one_rank as one_rank
