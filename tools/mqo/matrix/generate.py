"""The pretrain scripts, from one template and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2

from mqo.matrix import tables
from mqo.matrix.tables import Dataset, Mode, Model

TEMPLATE = "pretrain.sh.j2"
# The scripts that exist so far: the rest of the matrix follows from the same template.
GENERATED = (("llama32-1b", "wikipedia", "FA_linear_mxfp8"),)


def scripts() -> Iterator[tuple[Path, str]]:
    """(path below script/, text) of every generated script."""
    for model, dataset, mode in GENERATED:
        row = tables.models()[model], tables.datasets()[dataset], tables.modes()[mode]
        yield Path(model) / file_name(*row), render(*row)


def file_name(model: Model, dataset: Dataset, mode: Mode) -> str:
    """The documented name."""
    return f"pretrain_{model.name}_{dataset.name}_{mode.name}.sh"


def render(model: Model, dataset: Dataset, mode: Mode) -> str:
    """The text of one script."""
    loader = jinja2.FileSystemLoader(tables.HERE)
    options = {"keep_trailing_newline": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(loader=loader, **options).get_template(TEMPLATE)
    name = file_name(model, dataset, mode)
    trainings = list(tables.trainings())
    return template.render(model=model, dataset=dataset, mode=mode, file=name, trainings=trainings)


def write(folder: Path) -> list[Path]:
    """Write all scripts below `folder`, executable; the paths that changed."""
    changed = []
    for relative, text in scripts():
        path = folder / relative
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
            changed.append(path)
    return changed
