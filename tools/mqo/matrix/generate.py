"""The pretrain scripts and the table of modes in their README, from the tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import jinja2

from mqo.errors import DataError
from mqo.matrix import tables
from mqo.matrix.tables import Dataset, Mode, Model

TEMPLATE = "pretrain.sh.j2"
README = Path("README.md")
BEGIN, END = "<!-- modes: generated -->\n", "<!-- end of modes -->\n"


def scripts() -> Iterator[tuple[Path, str]]:
    """(path below script/, text) of every generated script."""
    modes = [mode for mode in tables.modes().values() if mode.scripts]
    cells = itertools.product(tables.models().values(), tables.datasets().values(), modes)
    for model, dataset, mode in cells:
        yield Path(model.name) / file_name(model, dataset, mode), render(model, dataset, mode)


def file_name(model: Model, dataset: Dataset, mode: Mode) -> str:
    """The documented name."""
    return f"pretrain_{model.name}_{dataset.name}_{mode.name}.sh"


def render(model: Model, dataset: Dataset, mode: Mode) -> str:
    """The text of one script."""
    loader = jinja2.FileSystemLoader(tables.HERE)
    options = {
        "keep_trailing_newline": True,
        "trim_blocks": True,
        "undefined": jinja2.StrictUndefined,
    }
    template = jinja2.Environment(loader=loader, **options).get_template(TEMPLATE)
    name = file_name(model, dataset, mode)
    trainings = tables.trainings()
    return template.render(
        model=model,
        dataset=dataset,
        mode=mode,
        file=name,
        trainings=list(trainings),
        small=[name for name, training in trainings.items() if training.is_smoke],
    )


def mode_table() -> str:
    """What each mode quantises, as a Markdown table."""
    lines = ["| mode | linear | QK | PV | scripts |", "|---|---|---|---|---|"]
    for mode in tables.modes().values():
        types = ("-" if quant_type == tables.NONE else quant_type for quant_type in mode.key)
        lines.append(f"| `{mode.name}` | {' | '.join(types)} | {'yes' if mode.scripts else ''} |")
    return "\n".join(lines) + "\n"


def with_mode_table(readme: str) -> str:
    """`readme` with the table of modes between its marks; DataError where these are not."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise DataError(
            f"{README} has no place for the table of modes",
            expected=f"the lines {BEGIN.strip()} and {END.strip()}",
        )
    return f"{head}{BEGIN}{mode_table()}{END}{tail}"


def write(folder: Path) -> list[Path]:
    """Write all scripts below `folder`, executable, and the table; the paths that changed."""
    changed = [folder / path for path, text in scripts() if _write(folder / path, text, 0o755)]
    readme = folder / README
    if readme.exists() and _write(readme, with_mode_table(readme.read_text(encoding="utf-8"))):
        changed.append(readme)
    return changed


def _write(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write the file unless it holds just this; whether it did not."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return True
