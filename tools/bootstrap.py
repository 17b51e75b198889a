"""Make .venv. This is the only file that runs outside of it, with any python3 and nothing else.

As a program: `python3 tools/bootstrap.py` makes or updates .venv and prints its Python's path.
As a module: `bootstrap.reexec()` continues the calling script inside .venv.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "mqo-stamp"
CONSTRAINTS = ROOT / "constraints.txt"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MINIMUM, BELOW = (3, 11), (3, 14)


def main() -> None:
    """Make .venv if need be, and print the path of its Python."""
    ensure()
    print(PYTHON)


def reexec() -> None:
    """Run the calling script again with .venv's Python, unless it runs there already."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    ensure()
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


def ensure() -> None:
    """Make or complete .venv, unless it is ready; a second process waits for the first.

    Ctrl-C, SIGTERM and SIGHUP end it with exit code 128 + the signal; the next call continues.
    """
    if _is_ready():
        return
    for stop in STOPS:
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, lambda number, _: sys.exit(128 + number))
    with _lock_file() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_ready():
            _require_python()
            _create()
            _install()
            _compile()
            STAMP.write_text(_fingerprint())


def _lock_file() -> TextIO:
    try:
        (ROOT / ".cache").mkdir(exist_ok=True)
        return (ROOT / ".cache" / "venv.lock").open("w")
    except OSError as error:
        _fail(
            "make .venv",
            f"{ROOT} cannot be written ({error.strerror})",
            "Its owner can set it up for all its readers: `python3 tools/bootstrap.py`, then "
            "`.venv/bin/mqo setup`. Or clone it into a folder of your own.",
        )


def _is_ready() -> bool:
    return STAMP.exists() and PYTHON.exists() and STAMP.read_text() == _fingerprint()


def _fingerprint() -> str:
    content = CONSTRAINTS.read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(content).hexdigest()


def _require_python() -> None:
    """Restart with a suitable Python from PATH if this one is not suitable."""
    if MINIMUM <= sys.version_info[:2] < BELOW:
        return
    for minor in range(BELOW[1] - 1, MINIMUM[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        if other and subprocess.run([other, "-c", ""], capture_output=True).returncode == 0:
            _say(f"this is Python {sys.version.split()[0]}; using {other}")
            sys.stdout.flush()
            os.execv(other, [other, *sys.argv])
    _fail(
        "find a Python",
        f"python3 is {sys.version.split()[0]}, and PATH has no python3.11 to python3.13",
        "Install one of those, with its venv module, and repeat the command.",
    )


def _create() -> None:
    """Make a virtual environment that can import the torch of its base Python, if it has one."""
    if (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    ):
        return
    inherits = importlib.util.find_spec("torch") is not None
    _say(
        f"making .venv with Python {sys.version.split()[0]}"
        + (", which has torch already" if inherits else "")
    )
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    command += ["--system-site-packages"] if inherits else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        _fail(
            "make .venv",
            (done.stderr or done.stdout).strip().replace("\n", " "),
            "On Debian and Ubuntu, `apt-get install python3-venv` installs the venv module.",
        )
    if inherits and sys.prefix != sys.base_prefix:
        # This Python belongs to a virtual environment, which --system-site-packages skips.
        torch = Path(importlib.util.find_spec("torch").origin)  # type: ignore[union-attr,arg-type]
        site = next(VENV.glob("lib/python3*/site-packages"))
        (site / "inherited.pth").write_text(f"{torch.parents[1]}\n")


def _install() -> None:
    """Install the package and its pinned dependencies, and print the name of each."""
    constraints = VENV / "constraints.txt"
    constraints.write_text("".join(_constraints()))
    _say("installing pinned packages; the first time this takes a few minutes")
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-compile", "--constraint", str(constraints)]
    command += ["--editable", f"{ROOT}[train,report,modelopt,dev]"]
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = []
    try:
        for line in pip.stdout:  # type: ignore[union-attr]
            output.append(line)
            if line.startswith("Collecting "):
                _say(f"  {line.split()[1]}")
        pip.wait()
    finally:
        if pip.poll() is None:
            pip.send_signal(signal.SIGINT)  # pip then removes its temporary folders
            pip.wait()
    if pip.returncode != 0:
        errors = [line for line in output if "ERROR" in line] or output
        _fail(
            "install packages",
            " ".join(line.strip() for line in errors[-3:]),
            "Check the network, the free space and `pip config list`, then repeat the command.",
        )


def _compile() -> None:
    """Compile the packages as pip would, but on all cores; files that cannot be compiled stay."""
    command = [str(PYTHON), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")]
    compiler = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        compiler.wait()
    finally:
        if compiler.poll() is None:
            os.killpg(compiler.pid, signal.SIGTERM)  # its workers would wait forever
            compiler.wait()


def _constraints() -> list[str]:
    """Return the pinned versions, without torch's if .venv inherits a torch."""
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([PYTHON, "-c", probe]).returncode != 0:
        return lines
    return [line for line in lines if not line.startswith("torch==")]


def _say(text: str) -> None:
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def _fail(step: str, reason: str, help: str) -> NoReturn:
    sys.exit(f"[setup] could not {step}: {reason}. {help}")


if __name__ == "__main__":
    main()
