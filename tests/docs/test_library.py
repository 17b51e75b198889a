"""The page on mqo.quant: its code prints what it shows, and each stable name has an example."""

import contextlib
import io
import re

import pytest
from mqo import quant
from mqo.project import Project
from mqo.quant.plugins import PLUGINS

PAGE = Project.here().root / "docs/library.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?"
BLOCKS = re.findall(BLOCK, TEXT, re.DOTALL | re.MULTILINE)
OF_QUANTIZERS = PAGE.with_name("quantizers.md").read_text(encoding="utf-8")
STABLE = TEXT.partition("## What is stable")[2].partition("Other names")[0].partition("ahead:")[2]


def test_the_code_prints_what_the_page_shows(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {}
    try:
        for code, shown in BLOCKS:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(PAGE), "exec"), names)
            assert printed.getvalue() == shown, code
    finally:
        PLUGINS.clear()


def test_every_stable_name_has_an_example():
    names = set(re.findall(r"`(\w+)`", STABLE))
    others = re.findall(BLOCK, OF_QUANTIZERS, re.DOTALL | re.MULTILINE)
    code = "".join(block for block, _ in BLOCKS + others)
    assert len(names) > 8 and names <= set(quant.__all__)
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
