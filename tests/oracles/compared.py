"""The numbers of values that tests compare with oracles, which docs/recipes.md links to."""

import tomllib
from pathlib import Path

COMPARED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def documented(recipe: str) -> int:
    """Return the number of values of a recipe that equal its oracle's to the last bit."""
    return COMPARED[recipe]["values"]
