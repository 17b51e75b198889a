"""Where a run writes what it measures."""

import os
from pathlib import Path

from megatron.quant.config import ENVIRONMENT_VARIABLE

METRICS = "metrics.jsonl"


def run_folder() -> Path | None:
    """The folder of this run's quant.toml; None for a run without one."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(path).parent if path else None
