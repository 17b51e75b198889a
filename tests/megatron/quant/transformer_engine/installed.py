"""Transformer Engine as MQO_TEST_ENGINE names it, imported: before `megatron.core`."""

import os

from tests import engine
from tests.get_packages import ENGINES

VERSION = os.environ["MQO_TEST_ENGINE"]
te = engine.install(ENGINES / VERSION, VERSION)
