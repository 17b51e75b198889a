"""No committed file holds upstream's text: not three consecutive lines of it.

A line counts when, without the white space around it and inside it, at least 12 characters are
left, among them 8 letters, and it is no import and no single name (which an import in brackets is
made of); the lines between two that count are skipped, so that blank lines and brackets do not
hide a run. Three lines that follow each other in a
committed file and, in the same order, in any of upstream's text files are an excerpt.
"""

import re
import subprocess
from itertools import pairwise

import pytest
from mqo.project import Project

RUN = 3
SHORTEST, LETTERS = 12, 8
TRIVIAL = re.compile(rb"\s*(from\s+\S+\s+import\b|import\s|\w+,?\s*$)")
TEXT = (".py", ".cpp", ".h", ".cu", ".md", ".txt", ".toml", ".yaml", ".yml", ".json", ".sh")


def counting_lines(content):
    """(line number, line without white space) of the lines that count."""
    for number, line in enumerate(content.splitlines(), 1):
        bare = b"".join(line.split())
        letters = sum(chr(c).isalpha() for c in bare)
        if len(bare) >= SHORTEST and letters >= LETTERS and not TRIVIAL.match(line):
            yield number, bare


def runs(content):
    """(first line number, hash) of every run of lines that count."""
    lines = list(counting_lines(content))
    for i in range(len(lines) - RUN + 1):
        yield lines[i][0], hash(tuple(bare for _, bare in lines[i : i + RUN]))


def excerpts(content, upstream):
    """The numbers of the lines at which an excerpt from upstream starts."""
    return [number for number, run in runs(content) if run in upstream]


@pytest.fixture(scope="module")
def sources(vendored):
    """{path: content} of upstream's text files, as they were before any patch."""
    read = vendored.pristine
    return {path: read(path) for path in vendored.upstream().files if path.endswith(TEXT)}


@pytest.fixture(scope="module")
def upstream(sources):
    """The runs of all of upstream's text."""
    return {run for content in sources.values() for _, run in runs(content)}


@pytest.fixture(scope="module")
def committed():
    """{path: content} of what git tracks here, or would with the next `git add`."""
    root = Project.here().root
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [root / name for name in listed.stdout.decode().split("\0") if name]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def test_no_committed_file_holds_an_excerpt(committed, upstream):
    found = {path.name: excerpts(content, upstream) for path, content in committed.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(committed) > 50


def test_upstreams_text_was_read(sources, upstream):
    assert len(sources) > 300
    assert len(upstream) > 50_000


# -- the check can fail ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def excerpt(sources):
    """Three consecutive lines, taken from the tree as the test runs."""
    lines = sources["megatron/core/tensor_parallel/layers.py"].splitlines()
    counting = [number for number, _ in counting_lines(b"\n".join(lines))]
    start = next(a for a, b in pairwise(counting[200:]) if b == a + 1 and a + 2 in counting)
    return lines[start - 1 : start + 2]


@pytest.mark.parametrize(
    "disguise",
    [
        lambda lines: lines,
        lambda lines: [b"    " + line.strip() + b"  " for line in lines],
        lambda lines: [lines[0], b"", lines[1], b"    )", b"import os", lines[2]],
        lambda lines: [line.replace(b", ", b",").replace(b" = ", b"=") for line in lines],
    ],
    ids=["as it is", "indented", "with lines between", "without blanks"],
)
def test_a_planted_excerpt_is_found(excerpt, upstream, disguise):
    planted = b"\n".join([b"# A line of our own, to begin with.", *disguise(excerpt)])
    assert excerpts(planted, upstream) == [2]


def test_two_lines_are_no_excerpt(excerpt, upstream):
    ours = b"# A line of our own, in between."
    assert excerpts(b"\n".join([*excerpt[:2], ours, excerpt[2]]), upstream) == []


def test_imports_and_brackets_do_not_count():
    lines = ["import os", "from a.b import (", "    the_long_name_of_something,", ")", "x = 1"]
    lines += ["    )", "],", "# ----------------------", "from a.b import something_else"]
    assert list(counting_lines("\n".join(lines).encode())) == []
