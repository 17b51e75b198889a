"""The command with which docs/convert.md publishes a folder is one that the hub's program has."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
DOCUMENT = Path(__file__).parents[2] / "docs/convert.md"


def test_the_documented_command_is_one_of_the_hubs_program():
    (line,) = re.findall(r"^    \S*(hf upload .*)$", DOCUMENT.read_text(), re.MULTILINE)
    program, command, *words = shlex.split(line)
    help_of = [Path(sys.executable).with_name(program), command, "--help"]
    done = subprocess.run(help_of, capture_output=True, text=True, check=True)
    assert "hf upload [OPTIONS] REPO_ID [LOCAL_PATH]" in done.stdout
    assert words == ["YOU/NAME", "MODEL", "--private"]
    assert "--private" in done.stdout
