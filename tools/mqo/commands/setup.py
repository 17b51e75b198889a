"""`mqo setup`: prepare the vendored tree, the patches, and the samples that are named."""

from __future__ import annotations

from typing import Annotated

import typer

from mqo.project import Project

Datasets = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="NAME", help="Also prepare this sample; repeatable."),
]


def setup(dataset: Datasets = None) -> None:
    """Prepare the vendored tree and the patches; a run prepares the sample that it needs."""
    from mqo.data.prepare import DATASETS, prepare
    from mqo.errors import check_name
    from mqo.launch.prepare import ready_tree
    from mqo.overlay.series import Series

    for name in dataset or ():
        check_name("dataset", name, DATASETS)
    project = Project.here()
    ready_tree(project, Series.of_project(project), print, allow_edits=False)
    for name in dataset or ():
        _, ready = prepare(project, name, report=print)
        print(f"data     : {ready.documents} documents, {ready.tokens:,} tokens of {name}")
