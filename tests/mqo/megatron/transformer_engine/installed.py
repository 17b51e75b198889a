"""Transformer Engine as MQO_TEST_ENGINE names it, imported: before `megatron.core`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
for folder in ("Megatron-LM", "Megatron-LM/examples/parallelism"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

from tests import engine  # noqa: E402
from tests.get_packages import ENGINES  # noqa: E402

VERSION = os.environ["MQO_TEST_ENGINE"]
te = engine.install(ENGINES / VERSION, VERSION)
