"""Run a launcher as Python does, with the programs that it starts forked.

`fork_launcher.py SOCKET PROGRAM WORD...`: SOCKET is that of a fork server, PROGRAM a module's name
or the path of a script.
"""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import forking
from mqo import process

if __name__ == "__main__":
    _, path, program, *words = sys.argv
    forking.server = lambda: SimpleNamespace(socket=path)
    process.spawn = forking.popen
    sys.argv = [program, *words]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = ""
        runpy.run_module(program, run_name="__main__", alter_sys=True)
