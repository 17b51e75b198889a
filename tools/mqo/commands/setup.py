"""`mqo setup`: prepare the vendored tree, the patches and the sample data."""

from __future__ import annotations

from mqo.project import Project


def setup() -> None:
    """Prepare what is missing: the vendored tree, the patches, the sample data."""
    from mqo.data.prepare import prepare
    from mqo.launch.prepare import ready_tree
    from mqo.matrix import tables
    from mqo.overlay.series import Series

    project = Project.here()
    ready_tree(project, Series.of_project(project), print, allow_edits=False)
    for name in tables.datasets():
        ready = prepare(project, name, report=print)
        print(f"data     : {ready.documents} documents, {ready.tokens:,} tokens of {ready.dataset}")
