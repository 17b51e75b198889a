"""Write the part of recipes.md on the recipes: their list, and one of them as an example.

    .venv/bin/python docs/recipe_tables.py

The list has what is published about the loss, and how many values the tests compare with an
independent implementation (tests/oracles/compared.toml, which the tests check).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqo.matrix.tables import models
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_files import names
from mqo.recipes.recipe import read
from mqo.recipes.show import recipe_lines

HERE = Path(__file__).resolve().parent
PAGE = HERE / "recipes.md"
COMPARED = HERE.parent / "tests/oracles/compared.toml"
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
    """Yield the list of recipes, and what `mqo recipe show` prints for the example."""
    compared = tomllib.loads(COMPARED.read_text(encoding="utf-8"))
    recipes = sorted(map(read, names()), key=lambda recipe: (recipe.family, recipe.name))
    yield "| recipe | family | what it is | published about the loss | oracle | values compared |"
    yield "|---|---|---|---|---|---|"
    yield from (_row(recipe, compared[recipe.name]) for recipe in recipes)
    yield from ("", f"    $ mqo recipe show {EXAMPLE}")
    yield from (f"    {line}".rstrip() for line in recipe_lines(read(EXAMPLE), models()))
    yield ""


def _row(recipe: Recipe, check: dict[str, Any]) -> str:
    cells = (recipe.name, recipe.family, recipe.summary, recipe.published)
    return f"| {' | '.join(cells)} | {check['oracle']} | {check['values']:,} |"


if __name__ == "__main__":
    main()
