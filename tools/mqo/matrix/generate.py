"""The pretrain scripts, and the generated tables of modes and formats in the documentation."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import jinja2

from mqo.errors import DataError
from mqo.matrix import tables
from mqo.matrix.tables import Dataset, Mode, Model
from mqo.torch_free import formats

TEMPLATE = "pretrain.sh.j2"
README, FORMATS = Path("README.md"), Path("../docs/formats.md")  # below script/


_SCALES = {
    "none": "none, or one for the tensor",
    "e8m0": "E8M0, one for each block of {}",
    "power-of-two": "a power of two, one for each block of {}",
    "fp32": "float32, one for each block of {}",
    "tensor": "float32, one for the tensor",
    "two-level": "E4M3, one for each block of {}; float32, one for the tensor",
    "hif4": "E6M2, one for each block of {}; powers of two, for each 8 and each 4 of it",
}


def scripts() -> Iterator[tuple[Path, str]]:
    """Yield (path below script/, text) of every generated script."""
    modes = [mode for mode in tables.modes().values() if mode.scripts]
    every = itertools.product(tables.models().values(), tables.datasets().values(), modes)
    for model, dataset, mode in every:
        yield Path(model.name) / file_name(model, dataset, mode), render(model, dataset, mode)


def file_name(model: Model, dataset: Dataset, mode: Mode) -> str:
    """Return the documented name."""
    return f"pretrain_{model.name}_{dataset.name}_{mode.name}.sh"


def render(model: Model, dataset: Dataset, mode: Mode) -> str:
    """Return the text of one script."""
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
    """Return what each mode quantizes, as a Markdown table."""
    lines = ["| mode | linear | QK | PV | scripts |", "|---|---|---|---|---|"]
    for mode in tables.modes().values():
        types = ("-" if quant_type == tables.NONE else quant_type for quant_type in mode.key)
        lines.append(f"| `{mode.name}` | {' | '.join(types)} | {'yes' if mode.scripts else ''} |")
    return "\n".join(lines) + "\n"


def format_table() -> str:
    """Return what each format is, as a Markdown table."""
    lines = ["| type | element | bits | values, besides 0 | scale | modes | source |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in formats.FORMATS.values():
        element, scale = row.element, _SCALES[row.scale].format(row.block)
        if isinstance(element, formats.Minifloat):
            bits = element.mantissa_bits
            grid = f"exponents {element.emin}..{element.emax}, mantissa bits {bits}"
            smallest, largest = element.emin - bits, element.max_value
            if element.emin == element.emax:
                grid = f"multiples of 2^{smallest}"
        else:
            ends = ", ".join(f"±{end}" for end, _ in element.widths)
            bits = ", ".join(str(bits) for _, bits in element.widths)
            grid = f"mantissa bits {bits} for exponents to {ends}; 0 beyond"
            smallest, largest = element.min_exponent, 2.0**element.max_exponent
        cells = (f"`{row.name}`", f"{element.name.upper()}: {grid}", str(element.bits))
        cells += (f"±2^{smallest} .. ±{largest:g}", scale, "yes" if row.modes else "", row.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between the marks of that name; DataError where these are not."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->\n"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise DataError(
            f"There is no place for the table of {name}",
            expected=f"the lines {begin.strip()} and {end.strip()}",
        )
    return f"{head}{begin}{table}{end}{tail}"


def write(folder: Path) -> list[Path]:
    """Write all scripts below `folder`, executable, and the tables; the paths that changed."""
    changed = [folder / path for path, text in scripts() if _write(folder / path, text, 0o755)]
    for path, name, table in ((README, "modes", mode_table), (FORMATS, "formats", format_table)):
        file = (folder / path).resolve()
        if file.exists():
            text = with_table(file.read_text(encoding="utf-8"), name, table())
            changed += [file] * _write(file, text)
    return changed


def _write(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write the file unless it holds just this; whether it did not."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return True
