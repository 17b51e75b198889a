"""Write the part of recipes.md on the recipes: `.venv/bin/python docs/recipe_tables.py`.

The part is the list of the recipes, and the beginning of what `mqo recipe show` prints for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mqo.matrix.tables import models
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_files import names
from mqo.recipes.recipe import read
from mqo.recipes.show import recipe_lines

HERE = Path(__file__).resolve().parent
PAGE = HERE / "recipes.md"
EXAMPLE = "nvfp4"
BEGIN, END = "<!-- written by docs/recipe_tables.py -->\n", "<!-- end of it -->\n"


def main() -> None:
    """Write recipes.md."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def written(page: str) -> str:
    """Return the page with the present recipes."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{chr(10).join(lines())}\n{END}{after}"


def lines() -> Iterator[str]:
    """Yield the list of recipes, and the beginning of what `mqo recipe show` prints for one."""
    recipes = sorted(map(read, names()), key=lambda recipe: (recipe.family, recipe.name))
    yield "| recipe | what it is |"
    yield "|---|---|"
    yield from map(_row, recipes)
    yield from ("", f"    $ mqo recipe show {EXAMPLE}")
    for line in recipe_lines(read(EXAMPLE), models()):
        yield f"    {line}".rstrip()
        if line.startswith("rule:"):
            break
    yield from ("    ...", "")


def _row(recipe: Recipe) -> str:
    return f"| {recipe.name} | {recipe.summary} |"


if __name__ == "__main__":
    main()
