"""What `mqo recipe` prints: 80 columns, as the documentation has it."""

import json
import runpy

import pytest
from mqo.cli import app
from mqo.project import Project
from mqo.recipes import recipe as recipes
from mqo.recipes.show import kept_out
from typer.testing import CliRunner

PAGE = Project.here().root / "docs/recipes.md"


def printed(*words):
    done = CliRunner().invoke(app, ["recipe", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", recipes.names())
def test_each_recipe_is_printed_in_80_columns_with_its_deviations(name):
    text = printed("show", name)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert all(deviation in words for deviation in recipes.read(name).deviations)


def test_the_documentation_has_the_list_and_the_example_that_are_printed():
    written = runpy.run_path(str(PAGE.with_name("recipe_tables.py")))["written"]
    assert written(PAGE.read_text()) == PAGE.read_text()


def test_the_list_names_every_recipe():
    text = printed("list")
    lines = text.splitlines()
    named = [line.strip() for line in lines if line.startswith("  ") and line[2] != " "]
    assert sorted(named) == recipes.names()
    assert max(map(len, lines)) <= 80
    families = [line for line in lines if line[:1].strip()]
    assert families == sorted({recipes.read(name).family for name in named})


def test_json_holds_the_resolved_table():
    found = json.loads(printed("show", "nvfp4", "--without", "2d", "--json"))
    rows = {(row["site"], row["operand"]): row for row in found["operands"]}
    assert rows["fprop", "weight"]["tile"] == "1x16"
    assert found["changes"] == ["without 2d"]


def test_a_printed_file_is_the_recipe(tmp_path):
    (tmp_path / "hif4.toml").write_text(printed("show", "hif4", "--toml"))
    own, shipped = recipes.read(str(tmp_path / "hif4.toml")), recipes.read("hif4")
    assert own.resolved() == shipped.resolved()
    assert own.label == f"hif4 recipe {own.digest}"
    assert shipped.label == "hif4 recipe"
    assert recipes.path_of("hif4").read_text() == printed("show", "hif4", "--toml")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hif4", "hif4 recipe; unquantized: output_layer"),
        ("nvfp4", "nvfp4 recipe; unquantized: output_layer; blocks 0, 14, 15 of 16"),
    ],
)
def test_a_run_says_what_stays_out(name, said):
    assert kept_out(recipes.read(name), 16) == said


def test_operands_that_the_forward_pass_rounded_are_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'types = { fprop = "mxfp8", dgrad = "mixed" }\n[operands]\n'
        '"dgrad.grad" = { quant_type = "none" }\n'
        '"dgrad.weight" = { quant_type = "none", source = "fprop" }\n'
    )
    assert "rounded in fprop before: dgrad.weight\n" in printed("show", str(path))
    rows = json.loads(printed("show", str(path), "--json"))["operands"]
    sources = [row.get("source") for row in rows if row["operand"] == "weight"]
    assert sources == [None, "fprop"]
