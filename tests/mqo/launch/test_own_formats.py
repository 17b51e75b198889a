"""The formats of a user in a run: which files count, and what a run keeps of their rows."""

import pytest
from mqo.errors import FormatError, MqoError, RunError
from mqo.launch.config import RunConfig, resolve
from mqo.launch.effects import resolved_config
from mqo.launch.finished import _settings as settings_of
from mqo.launch.own_types import OwnTypes
from mqo.matrix import tables
from mqo.quant.config import parse
from mqo.quant.formats import FORMATS
from mqo.quant.own_formats import OWN, users_file
from mqo.recipes import recipe as recipes
from mqo.runs import RunFolder

from ..own_format import FILE

OTHER = FILE.replace("block = 32", "block = 16")


@pytest.fixture
def write(tmp_path):
    """A function that writes a file of formats."""

    def write(text=FILE, name="own.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The user's own file, which is a type of every command."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    users_file().parent.mkdir(parents=True)
    return users_file()


def cell(mode, **rest):
    return resolve("llama32-1b", "wikipedia", mode, "tiny", **rest)


def formats_of(mode, **rest):
    return [*cell(mode, **rest).quantization.formats]


def renamed(name, text=FILE):
    return text.replace("own7", name)


# -- files -----------------------------------------------------------------------------------------


def test_a_row_becomes_a_type_of_every_mode(write):
    OwnTypes.from_options([write()])
    assert "own7" in tables.quant_types() and tables.modes()["FA_linear_own7"].linear == "own7"
    assert {"linear_own7", "own7"} <= {*tables.modes()} - {"linear_own8"}


def test_a_row_of_the_users_file_is_a_type_that_need_not_be_used(users):
    users.write_text(FILE)
    OwnTypes.from_options(None).refuse_unused([cell("linear_mxfp8").quantization])
    assert formats_of("linear_mxfp8") == []
    assert formats_of("linear_own7") == ["own7"]


def test_a_given_row_takes_the_place_of_the_users(users, write):
    users.write_text(OTHER)
    own = OwnTypes.from_options([write()])
    assert FORMATS["own7"].block == 32
    assert own.rows["own7"].digest == OWN["own7"].row.digest


@pytest.mark.parametrize(
    "text",
    [
        renamed("mxfp8"),
        renamed("fp8_tensor"),
        renamed("mixed"),
        renamed("bf16"),
        renamed("linear_mxfp8"),
        renamed("FA_mxfp8"),
        FILE + FILE[FILE.index("[formats") :].replace("own7", "linear_own7"),
        FILE.replace("32", "48"),
        FILE + "width = 3\n",
        FILE + 'light = "#ff0000"\n',
        FILE + 'color = "red"\nlight = "#ff0000"\ndark = "red;}"\n',
        FILE + 'least_sqnr = "high"\n',
        FILE.replace("[formats", "[formats.x"),
        "[formats\n",
        "",
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(write, text):
    file = write(text)
    with pytest.raises(FormatError, match=r"own\.toml"):
        OwnTypes.from_options([file])
    assert OWN == {}


def test_a_missing_file_and_two_definitions_are_refused(write, tmp_path):
    with pytest.raises(FormatError, match="absent"):
        OwnTypes.from_options([tmp_path / "absent.toml"])
    with pytest.raises(FormatError, match="own7"):
        OwnTypes.from_options([write(), write(OTHER, "other.toml")])
    OwnTypes.from_options([write(), write(FILE, "same.toml")])


def test_a_type_of_one_file_is_not_named_as_a_mode_of_another(write):
    with pytest.raises(FormatError, match="'linear_own7'"):
        OwnTypes.from_options([write(), write(renamed("linear_own7"), "modes.toml")])


def test_a_resolved_run_leaves_the_file_of_its_format_known(write):
    own = OwnTypes.from_options([write()])
    RunConfig.model_validate_json(cell("linear_own7").model_dump_json())
    assert OWN["own7"].file == write()
    assert own.file_of("own7") == write()


def test_a_given_file_without_a_used_row_is_refused(write):
    files = [write(), write(renamed("own8"), "other.toml")]
    own = OwnTypes.from_options(files)
    with pytest.raises(FormatError, match=r"other\.toml.*own8"):
        own.refuse_unused([cell("linear_own7").quantization])
    own.refuse_unused([cell("linear_own7").quantization, cell("own8").quantization])


# -- the run ---------------------------------------------------------------------------------------


def test_a_run_keeps_the_rows_that_it_uses(write):
    OwnTypes.from_options([write(), write(renamed("own8"), "other.toml")])
    assert formats_of("linear_own7") == ["own7"]
    assert formats_of("bf16") == []
    schedule = ("linear: mxfp4 until 0.5, then own8",)
    assert formats_of("linear_mxfp4", schedule=schedule) == ["own8"]
    assert formats_of("linear_mxfp4", attention="own7") == ["own7"]


def test_a_recipe_may_name_a_row(write, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('types = { fprop = "own7" }\n[operands."fprop.weight"]\nquant_type = "own8"\n')
    with pytest.raises(MqoError, match="own7"):
        recipes.read(str(path))
    OwnTypes.from_options([write(), write(renamed("own8"), "other.toml")])
    assert formats_of("bf16", recipe=recipes.read(str(path))) == ["own7", "own8"]


def test_the_name_of_a_run_has_the_version_of_its_numbers(write):
    versions = set()
    for text in (FILE, OTHER, FILE.replace("bits = 7", "bits = 8")):
        OwnTypes.from_options([write(text)])
        config = cell("linear_own7")
        (row,) = config.quantization.formats.values()
        assert config.quantization.name == f"linear_own7 {row.version}"
        assert row.version in config.title and " " not in config.title
        versions.add(row.version)
    assert len(versions) == 3


def test_texts_colors_and_bounds_do_not_change_the_version(write):
    OwnTypes.from_options([write()])
    plain = cell("linear_own7")
    colored = 'color = "red"\nlight = "#ee0000"\ndark = "#ff2222"\n'
    OwnTypes.from_options([write(f'{FILE}{colored}source = "here"\nleast_sqnr = 20\n')])
    config = cell("linear_own7")
    assert config.title == plain.title
    assert settings_of(config) == settings_of(plain)
    assert FORMATS["own7"].light == "#ee0000" and FORMATS["own7"].least_sqnr == 20


def test_records_make_the_type_without_the_file(write, tmp_path):
    OwnTypes.from_options([write()])
    config = cell("linear_own7")
    text = config.quant_toml(config.quantization.types)
    run = RunFolder(tmp_path)
    config.write(run)
    for read in (lambda: parse(text).formats["own7"], lambda: RunConfig.read(run)):
        del FORMATS["own7"]
        OWN.clear()
        assert read() in (config, config.quantization.formats["own7"])
        assert FORMATS["own7"].block == 32
    assert resolved_config(config, config.quantization.types).spec("own7").block == 32
    assert "own7" in config.layers_toml()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"block": 32', '"block": 16'),
        ('"block": 32', '"block": 48'),
        ('"bits": 7', '"bits": "7"'),
        ('"bits": 7', '"widths": 7'),
        ('"own7": {', '"mxfp8": {'),
        ('"own7": {', '"linear_mxfp4": {'),
        ('"row": {', '"row": ["own7"], "rows": {'),
        ('"digest": "', '"digest": "0'),
    ],
)
def test_damaged_records_are_refused(write, tmp_path, old, new):
    OwnTypes.from_options([write()])
    run = RunFolder(tmp_path)
    config = cell("linear_own7")
    run.config.write_text(config.model_dump_json().replace(":", ": "))
    text = run.config.read_text()
    assert RunConfig.read(run) == config and old in text
    run.config.write_text(text.replace(old, new))
    with pytest.raises(RunError, match=r"cell\.json"):
        RunConfig.read(run)


def test_two_versions_of_a_name_are_types_one_after_the_other(write):
    blocks = []
    for text in (FILE, OTHER, FILE):
        OwnTypes.from_options([write(text)])
        config = cell("linear_own7")
        resolved = resolved_config(config, config.quantization.types)
        blocks.append(resolved.operand_spec("fprop", "x", "layer", "own7").spec.block)
    assert blocks == [32, 16, 32]


def test_a_run_with_the_types_of_the_tree_keeps_those_that_it_has(write):
    own = OwnTypes.from_options([write(), write(renamed("own8"), "other.toml")])
    config = cell("source")
    own.refuse_unused([config.quantization])  # the tree is not read yet
    used = config.using({"fprop": "own8", "qk": "none"})
    assert [*used.quantization.formats] == ["own8"]
    assert used.quantization.name == f"source {used.quantization.formats['own8'].version}"


def test_colors_are_distinct_and_depend_on_the_names(write):
    names = [f"own{n}" for n in range(6)]
    files = [write(renamed(name), f"{name}.toml") for name in names]
    colors = []
    for order in (files, files[::-1]):
        OwnTypes.from_options(order)
        colors.append({name: FORMATS[name].light for name in names})
    assert colors[0] == colors[1] and len({*colors[0].values()}) == 6
    assert not {*colors[0].values()} & {row.light for n, row in FORMATS.items() if n not in names}
