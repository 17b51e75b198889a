"""Write the folder of a report, with its page, pictures and tables, completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mqo.process import temporary_folder

if TYPE_CHECKING:
    from mqo.report.compare import Group

PAGE = "index.html"


def write(groups: Sequence[Group], left_out: Sequence, out: Path, *, latex: bool = False) -> None:
    """Write all files of the report; at any time `out` is the complete old or new one."""
    import datetime

    from mqo.launch.naming import folder_part
    from mqo.report import latex as tex
    from mqo.report import tables
    from mqo.report.page import page
    from mqo.report.pictures import draw, draw_gaps

    with replaced(out) as folder:
        today = datetime.date.today().isoformat()
        (folder / PAGE).write_text(page(groups, left_out, today), encoding="utf-8")
        tables.write(folder, tables.tables(groups, left_out))
        for number, group in enumerate(groups, 1):
            names = (group.first.model, group.first.dataset, group.first.config)
            name = "_".join((str(number), *map(folder_part, names)))
            draw(group, folder / name)
            draw_gaps(group, folder / name)
            if latex:
                (folder / f"{name}.tex").write_text(tex.table(group), encoding="utf-8")


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then replaces `target`, an older report or nothing.

    RunError if `target` is something else.
    """
    from mqo.errors import RunError, full_disk_of
    from mqo.output import target_of

    target = target_of(target)
    ours = (target / PAGE).exists() and (target / "report.json").exists()
    if target.exists() and not ours and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(
            f"{target} holds something other than a report",
            expected="a new folder, or an older report, which is replaced",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_of(target.parent),
        temporary_folder(f".{target.name}-", target.parent) as folder,
    ):
        new, old = folder / "new", folder / "old"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
