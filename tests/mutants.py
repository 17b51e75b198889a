"""Change the product in small ways, one at a time, and list which changes the tests catch.

First run the tests with coverage's contexts, in one or several pieces, into a folder MAP:

    COVERAGE_FILE=MAP/NAME.cov python -m pytest --cov=tools --cov=Megatron-LM --cov=patches \\
        --cov-context=test --cov-report= --junitxml=MAP/NAME.xml TESTS

Then draw mutants, and run them as root on Linux. `run` adds a column of verdicts to the list, so
that the same list can be run again after tests changed (with a new MAP).

    python tests/mutants.py draw MAP COUNT SEED [PACKAGE...] > LIST
    python tests/mutants.py run MAP LIST > RESULT

coverage and pytest-cov must be on PYTHONPATH, not in .venv: numba imports coverage, which then
hides Megatron-LM/tools/coverage.py. Only lines that a test's own process reaches are changed: no
kernels that numba compiles. A mutant can be equivalent to the code that it replaces.
"""

import ctypes
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import types
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import fork_server
from mutations import ROOT, mutants_of

BUDGET = 12  # seconds that the chosen tests took when MAP was made
FILE_SECONDS = 0.3  # to collect another file of tests
LIMIT = 60  # seconds until the tests of a mutant are ended
QUERY = """select context.context, numbits from line_bits, context, file
    where context.id = context_id and file.id = file_id and path = ? and context.context like '%|%'
"""


class Map:
    """The tests that reach a line, and the seconds that each test took."""

    def __init__(self, folder):
        self.data = [sqlite3.connect(path) for path in sorted(folder.glob("*.cov"))]
        self.seconds = {}
        for case in (c for path in folder.glob("*.xml") for c in ET.parse(path).iter("testcase")):
            test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
            self.seconds[test] = float(case.get("time"))

    def files(self):
        """Return the Python files that the tests reach."""
        rows = (row for one in self.data for row in one.execute("select path from file"))
        found = {Path(path) for (path,) in rows if path[-3:] == ".py"}
        # Tests make and delete some below this folder.
        return sorted(str(path.relative_to(ROOT)) for path in found if path.is_file())

    def tests(self, file):
        """Return {line: the tests that reach it}."""
        found = defaultdict(set)
        for one in self.data:
            for context, bits in one.execute(QUERY, [str(ROOT / file)]):
                for line in (n for n in range(8 * len(bits)) if bits[n // 8] >> n % 8 & 1):
                    found[line].add(context.rpartition("|")[0])
        return found

    def chosen(self, mutant, without, before):
        """Return the tests to run: `before`, then the fastest, those of a file together."""
        lines, left, chosen = self.tests(mutant.file), BUDGET, {}
        names = set().union(*(lines[line] for line in mutant.lines)) - without
        for test in sorted(names, key=lambda one: (one != before, self.seconds.get(one, 1), one)):
            file = test.partition("::")[0]
            left -= self.seconds.get(test, 1) + FILE_SECONDS * (file not in chosen)
            if left < 0 and chosen:
                break
            chosen.setdefault(file, []).append(test)
        return [test for tests in chosen.values() for test in tests]


def draw(folder, count, seed, *only):
    """Print a list of mutants on lines that tests reach, the same number from each package."""
    known, packages = Map(folder), defaultdict(list)
    for file in known.files():
        reached = {line for line, tests in known.tests(file).items() if tests}
        found = (one for one in mutants_of(file) if reached & set(one.lines))
        if (package := "/".join(Path(file).parent.parts[:3])) in only or not only:
            packages[package] += found
    for found in packages.values():
        random.Random(seed).shuffle(found)
    rounds = (found[n] for n in range(count) for found in packages.values() if n < len(found))
    drawn = [one for one, _ in zip(rounds, range(count), strict=False)]
    print(*sorted(drawn, key=lambda one: (one.file, one.node.lineno)), sep="\n")


def isolate(scratch):
    """Give this process's children a checkout whose changes vanish, and no other to change."""
    unshare, new_mounts, new_processes = ctypes.CDLL(None).unshare, 0x20000, 0x20000000
    if unshare(new_mounts):
        sys.exit("mutants.py: unshare failed. Run it as root on Linux: a mutant may delete files.")
    layers = f"lowerdir={ROOT},upperdir={scratch}/upper,workdir={scratch}/work"
    for words in (
        ("mount", "--make-rprivate", "/"),
        ("mount", "-t", "tmpfs", "-o", "size=4g", "none", scratch),
        ("mkdir", f"{scratch}/upper", f"{scratch}/work", f"{scratch}/tmp"),
        ("mount", "-t", "overlay", "-o", layers, "none", ROOT),
        ("mount", "-o", "bind,remount,ro", "/"),
    ):
        subprocess.run(words, check=True)
    unshare(new_processes)


def failures(tests, mutant=None):
    """Return the names of the tests that fail, of a mutant the first one; "timeout" is a name."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        output, file = os.pipe()
        if os.fork() == 0:
            isolate(scratch)
            if (pid := os.fork()) == 0:
                run_isolated(scratch, file, tests, mutant)
            # The first process of a namespace takes with it all that were started.
            signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
            signal.alarm(LIMIT)
            if status := os.waitpid(pid, 0)[1]:
                os.write(file, b"timeout\n" if status == signal.SIGKILL else b"the end of pytest\n")
            os._exit(0)
        os.close(file)
        with os.fdopen(output) as lines:
            found = lines.read().splitlines()
        os.wait()
    return found


def run_isolated(scratch, file, tests, mutant):
    """Run the tests and write which ones fail, then end."""
    os.chdir(ROOT)
    subprocess.run(("mount", "-t", "proc", "proc", "/proc"), check=True)
    os.environ["TMPDIR"] = f"{scratch}/tmp"
    tempfile.tempdir = None
    if mutant:
        path = ROOT / mutant.file
        path.write_bytes(mutant.apply(path.read_bytes()))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    plugin = types.ModuleType("failures")
    plugin.pytest_collectreport = plugin.pytest_runtest_logreport = lambda report: (
        report.failed and os.write(file, f"{report.nodeid}\n".encode())
    )
    words = ["-p", "no:cacheprovider", "-m", "", *(["-x"] if mutant else []), *tests]
    code = sys.modules["pytest"].main(words, plugins=[plugin])
    if code > 1:
        os.write(file, f"pytest's exit code {int(code)}\n".encode())
    os._exit(0)


def verdict_on(mutant, before, known, good, bad):
    """Say what the tests of its lines find; `good` pass without a mutant, and `bad` do not."""
    while tests := known.chosen(mutant, bad, before.removeprefix("caught by ")):
        failed = failures(tests, mutant)[:1]
        if not failed or failed == ["timeout"]:
            return "timeout" if failed else f"survived {len(tests)} tests"
        if failed[0] not in good:
            also = failures(failed if failed[0] in tests else tests)
            (bad if also else good).update(also, failed)
        if failed[0] in good:
            return f"caught by {failed[0]}"
    return "no test passes without it"


def run(folder, listed):
    """Print the list with another column: the verdicts."""
    fork_server.load()  # most tests import the same; no thread is started
    for name in ("hypothesis", "libcst", "pydantic", "pytest", "rich", "typer"):
        __import__(name)
    known, good, bad = Map(folder), set(), set()
    for line in listed.read_text().splitlines():
        if line.startswith("#"):
            print(line)
            continue
        file, (place, change, *verdicts) = line.split(":")[0], line.split("\t")
        (mutant,) = (m for m in mutants_of(file) if str(m) == f"{place}\t{change}")
        verdict = verdict_on(mutant, (verdicts or [""])[-1], known, good, bad)
        print(line, verdict, sep="\t", flush=True)
    print("failing without a mutant:", *sorted(bad), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    program, folder, *words = sys.argv[1:]
    if program == "draw":
        draw(Path(folder), *map(int, words[:2]), *words[2:])
    else:
        run(Path(folder), *map(Path, words))
