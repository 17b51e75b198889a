"""Files of quantizers that a command reads: their names become types, and nothing is run."""

import shutil

import pytest
from mqo.errors import MqoError, PluginError, UnknownNameError
from mqo.matrix import tables
from mqo.quant.plugins import PLUGINS
from mqo.recipes import recipe as recipes
from mqo.recipes.quantizers import declare_file

HEAD = "from mqo.quant import quantizer\n"
RECIPE = 'types = { fprop = "mine" }\nplugins = ["mine.py"]\n'


def function(name, rest=""):
    return f'@quantizer("{name}"{rest})\ndef {name}(x, context):\n    return x\n'


@pytest.fixture
def write(tmp_path):
    """A function that writes a file that must not be run, and returns its path."""

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n{HEAD}{text}", encoding="utf-8")
        return path

    yield write
    assert not (tmp_path / "it ran").exists()


def test_the_quantizers_of_a_file_are_types_and_modes_then(write):
    path = write(function("mine", ", block=16") + function("other"))
    declared = declare_file(path)
    assert list(declared) == ["mine", "other"] and declared == PLUGINS
    assert {"linear_mine", "FA_mine", "FA_linear_mine", "mine", "qk_pv_other"} <= {*tables.modes()}
    assert tables.modes()["linear_mine"].linear == "mine"
    PLUGINS.clear()
    with pytest.raises(UnknownNameError):
        tables.pick(tables.modes(), "mode", "linear_mine")


def test_no_glob_and_no_script_has_them_beside_the_documented_modes(write):
    before = tables.expand_modes(tables.ALL), [mode.name for mode in tables.script_modes()]
    declare_file(write(function("mine")))
    assert (tables.expand_modes(tables.ALL), [m.name for m in tables.script_modes()]) == before
    assert tables.expand_modes("linear_mi*") == ["linear_mine"]


def test_a_file_may_be_declared_again_and_with_changes(write):
    path = write(function("mine"))
    declare_file(path)
    assert declare_file(path) == PLUGINS
    declare_file(write(function("mine", ", block=16")))
    assert PLUGINS["mine"].block == 16


@pytest.mark.parametrize("text", ["x = 1\n", "x = (\n", function("mxfp4"), function("mine") * 2])
def test_a_faulty_file_is_refused_and_declares_nothing(write, text):
    path = write(text)
    with pytest.raises(PluginError, match=r"mine\.py"):
        declare_file(path)
    assert PLUGINS == {}


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(PluginError, match=r"none\.py"):
        declare_file(tmp_path / "none.py")


@pytest.mark.parametrize("name", ["linear_mxfp8", "qk_pv_nvfp4"])
def test_the_name_of_a_mode_is_refused(write, name):
    assert name in tables.modes()
    with pytest.raises(PluginError, match=f"'{name}'"):
        declare_file(write(function(name)))


@pytest.mark.parametrize("names", [("mine", "linear_mine"), ("linear_mine", "mine")])
def test_a_quantizer_with_the_name_of_a_mode_of_another_is_refused(write, tmp_path, names):
    """In any order, in one file or in two."""
    with pytest.raises(PluginError, match="'linear_mine'"):
        declare_file(write("".join(map(function, names))))
    PLUGINS.clear()
    declare_file(write(function(names[0])))
    with pytest.raises(PluginError, match="'linear_mine'"):
        declare_file(write(function(names[1]), "second.py"))
    assert list(PLUGINS) == [names[0]]


# -- recipes ---------------------------------------------------------------------------------------


def test_reading_a_recipe_declares_its_quantizers_and_runs_nothing(write, tmp_path):
    write(function("mine", ', options={"gain": 2.0}'))
    path = tmp_path / "own.toml"
    path.write_text(RECIPE + "[plugin_options]\nmine = { gain = 3.0 }\n")
    recipe = recipes.read(str(path))
    assert recipe.plugins == (str(tmp_path / "mine.py"),)
    assert dict(recipe.resolved()["fprop", "x"].spec.options) == {"gain": 3.0}
    assert PLUGINS["mine"].function is None


def test_the_files_of_a_recipe_are_relative_to_it(write, tmp_path, monkeypatch):
    write(function("mine"))
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    (folder / "own.toml").write_text(RECIPE.replace("mine.py", "../mine.py"))
    assert recipes.read("recipes/own.toml").plugins == (str(tmp_path / "mine.py"),)
    (folder / "own.toml").write_text(RECIPE)
    with pytest.raises(PluginError, match=r"recipes/mine\.py"):
        recipes.read("recipes/own.toml")


def test_the_digest_of_a_recipe_has_its_options_and_not_its_place(write, tmp_path):
    write(function("mine", ', options={"gain": 2.0}'))
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    recipe = recipes.read(str(path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("own.toml", "mine.py"):
        shutil.copy(tmp_path / name, elsewhere)
    copy = recipes.read(str(elsewhere / "own.toml"))
    assert copy.plugins != recipe.plugins
    assert (copy.digest, copy.label) == (recipe.digest, recipe.label)
    path.write_text(RECIPE + "[plugin_options]\nmine = { gain = 3.0 }\n")
    assert recipes.read(str(path)).digest != recipe.digest


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('plugins = "mine.py"\n', "'mine.py'"),
        ("plugins = [3]\n", "3"),
        ('plugins = ["missing.py"]\n', "missing.py"),
        ("", "'mine'"),
        ('plugins = ["mine.py"]\n[plugin_options]\nmine = 3\n', "plugin_options.mine"),
        ('plugins = ["mine.py"]\n[plugin_options]\nmine = { gian = 3.0 }\n', "'gian'"),
        ('plugins = ["mine.py"]\n[plugin_options]\nmine = { gain = "3" }\n', "gain"),
        ('plugins = ["mine.py"]\n[plugin_options]\nmine = { gain = nan }\n', "gain"),
        ('plugins = ["mine.py"]\n[plugin_options]\nother = { gain = 3.0 }\n', "'other'"),
        ('plugins = ["mine.py"]\n[plugin_options]\nmxfp8 = { gain = 3.0 }\n', "'mxfp8'"),
    ],
)
def test_a_faulty_recipe_is_refused(write, tmp_path, text, complaint):
    write(function("mine", ', options={"gain": 2.0}'))
    path = tmp_path / "own.toml"
    path.write_text('types = { fprop = "mine" }\n' + text)
    with pytest.raises(MqoError) as fault:
        recipes.read(str(path))
    assert complaint in str(fault.value)
