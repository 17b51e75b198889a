"""A faster allocator than glibc's for commands that tokenize, where the system has one.

Hugging Face's tokenizers allocate and free several small strings a token, tens of thousands of them
at once: glibc's malloc is two fifths of the time (benchmarks/results/data-2026-11-22.md).
"""

import ctypes
import os
import sys

KNOWN = ("libmimalloc.so.3", "libmimalloc.so.2", "libjemalloc.so.2")  # the fastest first


def preload() -> None:
    """Start this process's command again with the first of KNOWN; nothing where there is none.

    An allocator is chosen when a program is loaded, so that only a new start can change it. One
    that LD_PRELOAD names already stays.
    """
    given = sys.argv[1:]
    # Arguments that are not the process's own, a test's say, would be lost.
    if "LD_PRELOAD" in os.environ or given != sys.orig_argv[len(sys.orig_argv) - len(given) :]:
        return
    for name in KNOWN:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        sys.stdout.flush()
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | {"LD_PRELOAD": name})
