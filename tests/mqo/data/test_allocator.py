import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from mqo.data import allocator
if sys.argv[1] == "other":
    sys.argv[1:] = ["other", "arguments"]
allocator.KNOWN = tuple(sys.orig_argv[3:])
print("start", flush=True)
allocator.preload()
print(os.environ.get("LD_PRELOAD"), sys.argv[1:], "libutil" in open("/proc/self/maps").read())
"""


def output(*known: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, *known]
    environment = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


def test_the_first_library_there_is_is_preloaded_with_the_same_arguments():
    known = ("libnone-such.so.9", "libutil.so.1")
    assert output(*known) == ["start", "start", f"libutil.so.1 {list(known)} True"]


def test_without_a_library_nothing_is_started_again():
    assert output("libnone-such.so.9") == ["start", "None ['libnone-such.so.9'] False"]


def test_the_users_choice_stays():
    assert output("libutil.so.1", LD_PRELOAD="libm.so.6") == [
        "start",
        "libm.so.6 ['libutil.so.1'] False",
    ]


def test_arguments_that_are_not_the_processs_own_are_not_lost():
    assert output("other", "libutil.so.1") == ["start", "None ['other', 'arguments'] False"]
