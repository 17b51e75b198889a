"""`mqo doctor`: report what this machine has, and what each missing piece costs."""

from __future__ import annotations

import typer

from mqo.commands.options import JsonOption, TreeOption, root_of
from mqo.project import Project
from mqo.terminal import emit


def doctor(as_json: JsonOption = False, tree: TreeOption = None) -> None:
    """Report what is installed, and what each missing piece costs; exit 1 if action is due."""
    from mqo.doctor import diagnosis_lines, examine
    from mqo.overlay.tree import Tree

    project = Project.here()
    diagnosis = examine(project, Tree(root_of(tree)))
    emit("doctor", diagnosis, "\n".join(diagnosis_lines(diagnosis)), as_json, clean=diagnosis.clean)
    raise typer.Exit(0 if diagnosis.clean else 1)
