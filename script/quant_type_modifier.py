#!/usr/bin/env python3
"""Show and set the quant types in Megatron's source. See --help and docs/quant_type_modifier.md.

--check needs only the standard library of Python 3.11; other packages come from .venv.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import bootstrap

if sys.version_info < (3, 11):  # noqa: UP036 - runs under any python3
    bootstrap.reexec()

from mqo import process

with process.command():
    from mqo.commands.quant_type_modifier import main

    try:
        code = main()
    except ModuleNotFoundError as error:
        if error.name not in ("filelock", "libcst"):
            raise
        bootstrap.reexec()  # nothing is written or printed before they are imported
        raise
    sys.exit(code)
