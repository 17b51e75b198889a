"""Generate the pretrain scripts, and the tables of modes and formats in the documentation."""

import itertools
import re
import shlex
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import jinja2

from mqo.errors import DataError
from mqo.matrix import tables
from mqo.matrix.tables import Dataset, Mode, Model
from mqo.output import new_file
from mqo.project import Project
from mqo.quant import formats

TEMPLATE = "pretrain.sh.j2"
# {kind of scale: its description}
SCALES = {
    "none": "none, or a power of two per tensor",
    "e8m0": "E8M0 per {block}",
    "power-of-two": "a power of two per {block}",
    "fp32": "float32 per {block}",
    "tensor": "float32 per tensor",
    "one-level": "{element} per {block}",
    "two-level": "{element} per {block}, float32 per tensor",
    "hif4": "E6M2 per {block}, powers of two per 8 and per 4",
}
README, FORMATS = Path("README.md"), Path("../docs/formats.md")  # below script/


def scripts(
    types: Collection[str] | None = None, launcher: Path | None = None
) -> Iterator[tuple[Path, str]]:
    """Yield (relative path, text) of every documented script, or of the scripts of `types`.

    They start `launcher`, by default the train_config.py of their folder.
    """
    modes = tables.script_modes(types)
    every = itertools.product(tables.script_models().values(), tables.datasets().values(), modes)
    for parts in every:
        yield Path(parts[0].name) / file_name(*parts), render(*parts, launcher)


def file_name(model: Model, dataset: Dataset, mode: Mode) -> str:
    """Return the documented name of a script."""
    return f"pretrain_{model.name}_{dataset.name}_{mode.name}.sh"


def render(model: Model, dataset: Dataset, mode: Mode, launcher: Path | None = None) -> str:
    """Return the text of one script."""
    loader = jinja2.FileSystemLoader(tables.HERE)
    environment = jinja2.Environment(
        loader=loader,
        keep_trailing_newline=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template(TEMPLATE)
    name = file_name(model, dataset, mode)
    trainings = tables.trainings()
    return template.render(
        model=model,
        dataset=dataset,
        mode=mode,
        file=name,
        launcher=shlex.quote(str(launcher)) if launcher else "",
        trainings=list(trainings),
        small=[name for name, training in trainings.items() if training.is_smoke],
    )


def mode_table() -> str:
    """Return a Markdown table of what each pattern of modes quantizes, followed by the types."""
    lines = ["| mode | linear | QK | PV | scripts |", "|---|---|---|---|---|"]
    for family in tables.families():
        cells = ("T" if site in family.sites else "-" for site in ("linear", "qk", "pv"))
        documented = [name for name in family.types if tables.modes()[family.mode(name)].scripts]
        which = " ".join(f"`{family.mode(name)}`" for name in documented)
        lines.append(f"| `{family.mode('T')}` | {' | '.join(cells)} | {which} |")
    types = " ".join(f"`{name}`" for name in tables.quant_types())
    return "\n".join(lines) + f"\n\nT is one of {types}.\n"


def format_table() -> str:
    """Return a Markdown table of the formats."""
    lines = ["| type | element | scale | source |"]
    lines.append("|---|---|---|---|")
    for row in formats.FORMATS.values():
        element = row.element
        cells = [f"`{row.name}`", f"{element.name.upper()}: {_grid(element)}"]
        source = re.split("[;:]", row.source)[0]
        cells += [_scale(row), source]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _scale(row: formats.Format) -> str:
    """Return the scales of a format in words."""
    element = row.block_scale.name.upper() if row.block_scale else ""
    return SCALES[row.scale].format(block=row.block, element=element)


def _grid(element: formats.Minifloat | formats.TaperedFormat) -> str:
    """Return an element's values in words."""
    if isinstance(element, formats.TaperedFormat):
        ends = ", ".join(f"±{end}" for end, _ in element.widths)
        bits = ", ".join(str(bits) for _, bits in element.widths)
        return f"mantissa bits {bits} for exponents to {ends}; 0 beyond"
    if element.emin == element.emax:
        return f"multiples of 2^{element.min_exponent}"
    return f"exponents {element.emin}..{element.emax}"


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between the marks of that name; DataError without the marks."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->\n"
    head, opened, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (opened and closed):
        raise DataError(
            f"The page has no marks for the table of {name}",
            expected=f"the lines {begin.strip()} and {end.strip()}",
        )
    return f"{head}{begin}{table}{end}{tail}"


def write(folder: Path, types: Collection[str] | None = None) -> list[Path]:
    """Write executable scripts below `folder`; return the paths that changed.

    Without `types` write the documented scripts and the tables; with `types` only scripts of these
    types, which start this project's launcher.
    """
    launcher = Project.here().root / "script/train_config.py" if types is not None else None
    texts, is_new = scripts(types, launcher), not folder.exists()
    try:
        changed = [folder / path for path, text in texts if _write(folder / path, text, 0o755)]
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    tables_of = ((README, "modes", mode_table), (FORMATS, "formats", format_table))
    for path, name, table in tables_of if types is None else ():
        file = (folder / path).resolve()
        if file.exists():
            changed += write_table(file, name, table())
    return changed


def write_table(page: Path, name: str, table: str) -> list[Path]:
    """Write a table between its marks in a page; return the page if it changed."""
    text = with_table(page.read_text(encoding="utf-8"), name, table)
    return [page] * _write(page, text)


def _write(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write the file if its content differs; return whether it did."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    with new_file(path) as file:
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    return True
