"""Change the product in small ways, one at a time, and list which changes the tests catch.

First run the tests with coverage's contexts, in one or several pieces, into a folder MAP:

    pip install coverage pytest-cov
    COVERAGE_FILE=MAP/NAME.cov python -m pytest --cov=tools --cov=Megatron-LM --cov=patches \\
        --cov-context=test --cov-report= --junitxml=MAP/NAME.xml TESTS

Then draw mutants and run them. `run` adds a column of verdicts to the list. To compare, change the
tests, make MAP again, and run the result as a list.

    python tests/mutants.py draw MAP COUNT SEED [PACKAGE...] > LIST
    python tests/mutants.py run MAP LIST > RESULT

Only lines that a test's own process reaches are changed: no kernels that numba compiles, and no
code that only other processes run. A mutant can be equivalent to the code that it replaces.
"""

import ast
import copy
import ctypes
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 12  # seconds that the chosen tests took when MAP was made
FILE_SECONDS = 0.3  # to collect another file of tests
LIMIT = 60  # seconds until the tests of a mutant are ended
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.LShift, ast.RShift)),
)
OTHER = dict(PAIRS) | {second: first for first, second in PAIRS}
OTHER |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
NOT_CHANGED = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """A piece of a file, the text that replaces it, and the lines that say which tests reach it."""

    file: str
    node: ast.AST
    text: str
    lines: tuple

    def __str__(self):
        place = f"{self.file}:{self.node.lineno}:{self.node.col_offset}"
        return f"{place}\t{ast.unparse(self.node)[:70]!r} -> {self.text[:70]!r}"

    def apply(self, content):
        """Return the file's content with the change."""
        lines, node = content.split(b"\n"), self.node
        before = [*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]]
        after = [lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]]
        return b"\n".join(before) + self.text.encode() + b"\n".join(after)


def replaced(node):
    """Return the node with another operator, constant or value; None if there is none."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in OTHER:
            new.ops[0] = OTHER[type(op)]()
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            new.op = OTHER[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
        case ast.Raise() | ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            new.value = ast.Constant(None)
        case _:
            return None
    return new


def mutants_of(file):
    """Yield all mutants of the functions of a file."""

    def visit(node, statement):
        function = isinstance(node, ast.FunctionDef)
        if isinstance(node, ast.stmt):
            inside = statement is not None and not isinstance(node, ast.ClassDef)
            statement = node if inside and not function else statement
        new = replaced(node) if statement else None
        if new is not None:
            text = ast.unparse(new) if isinstance(node, ast.stmt) else f"({ast.unparse(new)})"
            yield Mutant(file, node, text, (statement.lineno, node.lineno))
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                # The values in an f-string have no places of their own in Python 3.11.
                if not isinstance(child, ast.AST) or isinstance(node, ast.JoinedStr):
                    continue
                if name not in NOT_CHANGED and not isinstance(child, ast.arguments):
                    yield from visit(child, statement or (node if function else None))

    yield from visit(ast.parse((ROOT / file).read_bytes()), None)


class Map:
    """The tests that reach a line, and the seconds that each test took."""

    def __init__(self, folder):
        # Not with coverage: `import coverage` would hide Megatron-LM/tools/coverage.py from tests.
        self.data = [sqlite3.connect(path) for path in sorted(folder.glob("*.cov"))]
        self.seconds = {}
        for path in folder.glob("*.xml"):
            for case in ET.parse(path).iter("testcase"):
                test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
                self.seconds[test] = float(case.get("time"))

    def files(self):
        """Return the Python files that the tests reach."""
        rows = (row for one in self.data for row in one.execute("select path from file"))
        return sorted({str(Path(path).relative_to(ROOT)) for (path,) in rows if path[-3:] == ".py"})

    def tests(self, file):
        """Return {line: the tests that reach it}."""
        found = defaultdict(set)
        query = "select context.context, numbits from line_bits, context, file"
        query += " where context.id = context_id and file.id = file_id and path = ?"
        query += " and context.context like '%|%'"
        for one in self.data:
            for context, bits in one.execute(query, [str(ROOT / file)]):
                for line in (n for n in range(8 * len(bits)) if bits[n // 8] >> n % 8 & 1):
                    found[line].add(context.rpartition("|")[0])
        return found

    def chosen(self, mutant, without):
        """Return the tests to run: the fastest first, those of a file together."""
        lines, left, chosen = self.tests(mutant.file), BUDGET, {}
        names = set().union(*(lines[line] for line in mutant.lines)) - without
        for test in sorted(names, key=lambda name: (self.seconds.get(name, 1), name)):
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


class Failures:
    """A plugin that writes the names of the tests that fail."""

    def __init__(self, file):
        self.file = file

    def pytest_runtest_logreport(self, report):
        if report.failed:
            os.write(self.file, f"{report.nodeid}\n".encode())

    pytest_collectreport = pytest_runtest_logreport


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
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    words = ["-p", "no:cacheprovider", "-m", "", *(["-x"] if mutant else []), *tests]
    code = sys.modules["pytest"].main(words, plugins=[Failures(file)])
    if code > 1:
        os.write(file, f"pytest's exit code {int(code)}\n".encode())
    os._exit(0)


def verdict_on(mutant, known, good, bad):
    """Say what the tests of its lines find; `good` pass without a mutant, and `bad` do not."""
    while tests := known.chosen(mutant, bad):
        failed = failures(tests, mutant)[:1]
        if not failed:
            return f"survived {len(tests)} tests"
        if failed == ["timeout"]:
            return "timeout"
        if failed[0] not in good:
            bad.update(failures(tests))
            good.update({*tests, *failed} - bad)
        if failed[0] in good:
            return f"caught by {failed[0]}"
    return "no test passes without it"


def run(folder, listed):
    """Print the list with another column: the verdicts."""
    sys.path.insert(0, str(ROOT / "tests"))
    __import__("fork_server").load()  # most tests import the same; no thread is started
    for name in ("hypothesis", "libcst", "pydantic", "pytest", "rich", "typer"):
        __import__(name)
    known, good, bad = Map(folder), set(), set()
    for line in listed.read_text().splitlines():
        if line.startswith("#"):
            print(line)
            continue
        file, place = line.split(":")[0], line.split("\t")[:2]
        (mutant,) = (one for one in mutants_of(file) if str(one).split("\t") == place)
        print(line, verdict_on(mutant, known, good, bad), sep="\t", flush=True)
        print("failing without a mutant:", *sorted(bad), file=sys.stderr, flush=True)


if __name__ == "__main__":
    program, folder, *words = sys.argv[1:]
    if program == "draw":
        draw(Path(folder), *map(int, words[:2]), *words[2:])
    else:
        run(Path(folder), *map(Path, words))
