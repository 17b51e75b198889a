"""Megatron-LM/README.md lists the patched files of the patched tree."""

import re

from mqo.matrix.generate import with_table
from mqo.overlay.file_table import file_table
from mqo.project import Project


def test_each_patched_file_is_in_the_row_of_its_patches_in_order(patched):
    manifest = patched.tree.manifest()
    rows = [row.strip("| ").split(" | ") for row in file_table(manifest).splitlines()[2:]]
    listed = {path: names for paths, names in rows for path in re.findall(r"`(\S+?)`", paths)}
    assert listed == {
        path: ", ".join(f"`{name}`" for name, _ in file.stages)
        for path, file in manifest.files.items()
    }
    assert listed["megatron/core/gadget.py"] == "`new_engine`"
    assert len({names for _, names in rows}) == len(rows)
    assert rows[-1][0].count("<br>") == max(paths.count("<br>") for paths, _ in rows)


def test_the_committed_table_is_that_of_the_patched_tree(vendored):
    text = (Project.here().tree / "README.md").read_text(encoding="utf-8")
    table = file_table(vendored.manifest())
    assert "`megatron/core/tensor_parallel/layers.py`" in table
    assert with_table(text, "patched files", table) == text
