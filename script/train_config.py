#!/usr/bin/env python3
"""Train a MODEL on a DATASET in a MODE. See --help, --list and script/README.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import bootstrap

bootstrap.reexec()

from mqo import process  # noqa: E402

with process.command():
    from mqo.commands.train_config import main

    main()
