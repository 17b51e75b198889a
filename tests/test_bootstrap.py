"""The set-up, stopped."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from .vendored_tree import PROJECT

PROGRAM = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import bootstrap
bootstrap.PYTHON = pathlib.Path(sys.argv[2])
bootstrap.ROOT = bootstrap.PYTHON.parent
bootstrap._is_ready = lambda: False
bootstrap._create = bootstrap._install = lambda: None
bootstrap.ensure()
"""
COMPILER = """#!/bin/sh
sleep 1000 &
echo $! > "$0.new"
mv "$0.new" "$0.pid"
wait
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_compilation_that_is_stopped_leaves_no_process(tmp_path, stop):
    compiler = tmp_path / "a compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM, PROJECT.root / "tools", compiler]
    with subprocess.Popen(command) as process:
        while not (started := tmp_path / "a compiler.pid").exists():
            assert process.poll() is None
            time.sleep(0.01)
        worker = os.pidfd_open(int(started.read_text()))
        process.send_signal(stop)
        assert process.wait() == 128 + stop
    assert select.select([worker], [], [], 60)[0]
    os.close(worker)
