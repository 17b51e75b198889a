"""Imports the engine before all else, where a process is for it."""

import os

if "MQO_TEST_ENGINE" in os.environ:
    from . import installed as installed
