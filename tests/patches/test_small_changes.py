"""An entry changes the files that it names, and only the lines that it has to."""

import pytest
from mqo.overlay.diff import entry_diffs

from .conftest import PIN, SERIES, covers

# Lines that an entry adds to each of its files, and that it removes from it.
LINES = {
    "quant_sites": [(20, 12), (9, 4)],
    "cpu_trainer": [(3, 0), (3, 0), (1, 3), (3, 2), (3, 0), (1, 1), (1, 1), (1, 1)],
    "run_hooks": [(3, 0), (7, 2), (4, 0)],
    "divergence": [(1, 1), (2, 1)],
    "hybrid_model": [(2, 1), (2, 1)],
    "local_norms": [(2, 1), (1, 1), (2, 1)],
    "mla_local": [(4, 2), (4, 0)],
}


@pytest.mark.parametrize("name", LINES)
def test_the_change_to_upstream_is_small(vendored, name):
    changes = {d.path: d for d in entry_diffs(vendored, vendored.manifest(), name)}
    edits = (e for e in SERIES[name].load_edits() if covers(e.versions, PIN))
    assert set(changes) == {edit.path for edit in edits}
    assert [(d.added, d.removed) for d in changes.values()] == LINES[name]
