"""Phrases to avoid in docstrings, comments, messages and pages; CONTRIBUTING.md has better ones."""

import ast
import io
import re
import subprocess
import tokenize

import pytest
from mqo.project import Project

ROOT = Project.here().root
PHRASES = re.compile(
    r"""
    \bbeside\b                                  # next to, with, in addition to
    | \bin\s+the\s+place\s+of\b                 # instead of
    | \b(?:go|goes|going|gone)\s+on\b           # continue, resume
    | \bas\s+`?[\w.-]+`?\s+(?:has|have)\s+it\b  # as in X
    | \b(?:nobody|somebody|whoever)\b
    | \b(?:anew|afresh|whence|thereof|lest)\b   # again, from scratch
    | \bshall\b
    | \bsees?\s+to\s+(?:it|that)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
FOLDERS = ("tools", "Megatron-LM", "patches", "script", "benchmarks", "docs", "README.md")


def prose(path):
    """The texts that people read in a Python or Markdown file, code blocks apart."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield re.sub(r"^```.*?^```$", "", source, flags=re.DOTALL | re.MULTILINE)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_phrase_to_avoid_is_used(folder):
    command = ["git", "ls-files", f"{folder}/*.py", f"{folder}/*.md", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.splitlines() if name.endswith((".py", ".md"))]
    matches = [
        f"{name}: {match[0]}"
        for name in sorted(set(files))
        for text in prose(ROOT / name)
        for match in PHRASES.finditer(text)
    ]
    assert files
    assert not matches
