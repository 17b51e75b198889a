"""Where a run writes what it measures."""

import os
from pathlib import Path

from megatron.quant.options import ENVIRONMENT_VARIABLE

from .files import RunFiles


def run_folder() -> RunFiles | None:
    """Return the folder of this run's quant.toml; None for a run without one."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    return RunFiles(Path(path).parent) if path else None
