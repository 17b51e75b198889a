"""Megatron-LM/README.md lists the patched files of the patched tree."""

from mqo.matrix.generate import with_table
from mqo.overlay.file_table import file_table
from mqo.project import Project


def test_each_patched_file_has_a_row_with_its_patches_in_order(patched):
    manifest = patched.tree.manifest()
    rows = file_table(manifest).splitlines()[2:]
    assert len(rows) == len(manifest.files)
    assert "| `megatron/core/gadget.py` | `new_engine` |" in rows
    (layers,) = (row for row in rows if "core/layers.py" in row)
    assert layers.endswith("| `quant_sites` |")


def test_the_committed_table_is_that_of_the_patched_tree(vendored):
    text = (Project.here().tree / "README.md").read_text(encoding="utf-8")
    table = file_table(vendored.manifest())
    assert "`megatron/core/tensor_parallel/layers.py`" in table
    assert with_table(text, "patched files", table) == text
