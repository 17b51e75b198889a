"""How the forward pass of a saved model is quantized, with custom quantizers in particular."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from mqo.errors import (
    CheckpointError,
    FormatError,
    MqoError,
    PluginError,
    RunError,
    UnknownNameError,
)
from mqo.launch import forward_pass
from mqo.launch.forward_pass import AS_TRAINED, ForwardPass, SavedModel, forward_passes
from mqo.launch.options import quant_toml
from mqo.launch.origin import sign
from mqo.launch.own_formats import format_rows
from mqo.launch.own_types import NO_OWN_TYPES, OwnTypes
from mqo.project import Project
from mqo.quant.formats import FORMATS
from mqo.quant.own_formats import OWN
from mqo.quant.plugin_modules import digest_of
from mqo.runs import RunFolder

from ..own_format import FILE

TREE = SimpleNamespace(root=Path("/no tree"))
LINEAR_MINE = {"fprop": "mine", "qk": "none", "pv": "none"}
ALL_MINE = dict.fromkeys(LINEAR_MINE, "mine")


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "clone").mkdir()
    project = Project(tmp_path / "clone")
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: project))
    return project


@pytest.fixture
def described(monkeypatch):
    """The types and the presence of a recipe that checkpoints record; the program is not run."""
    facts = {"types": ALL_MINE | {"dgrad": "mine", "wgrad": "mine"}, "rows": False}
    facts |= {"formats": {}, "plugins": {}}
    monkeypatch.setattr(forward_pass, "describe", lambda tree, folder: facts)
    return facts


def function(name="mine", options='{"gain": 2.0, "kind": "a"}'):
    head = f'@quantizer("{name}", options={options})'
    return f"{head}\ndef {name}(x, context):\n    return x\n"


@pytest.fixture
def write(write_quantizers):
    """A function that writes a file of quantizers: of `mine`, unless told otherwise."""
    return lambda *functions, path="given/mine.py": write_quantizers(
        *(functions or [function()]), path=path
    )


def rows_of(file, options="gain = 3.0", name="mine"):
    declared = 'options = { gain = 2.0, kind = "a" }'
    return (
        f'[plugins.{name}]\nfile = "plugins/mine/mine.py"\ndigest = "{digest_of(file)}"\n'
        f"[plugins.{name}.declared]\n{declared}\n[plugins.{name}.options]\n{options}\n"
    )


ASKED = "".join(f'{site} = "mine"\n' for site in ("fprop", "dgrad", "wgrad", "qk", "pv"))


def signed_run(project, root, rows):
    """A run of these rows, which saved a checkpoint."""
    folder = RunFolder(root)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    folder.config.write_text('{"experiment": {"checkpoint": null}}')
    folder.quant_config.write_text(f"[asked]\n{ASKED}{rows}")
    sign(project, folder)
    return folder


@pytest.fixture
def run(project, write, tmp_path):
    """A signed run with a quantizer, which saved a checkpoint."""
    file = write(path="runs/first/plugins/mine/mine.py")
    return signed_run(project, tmp_path / "runs/first", rows_of(file))


def passes(run, *modes, files=(), options=(), choice=None):
    """The forward passes of a run with these own types, or the options of a command line."""
    models = [SavedModel.find(run.root)]
    choice = choice or OwnTypes.from_options(plugins=files, options=options)
    return [quant for _, quant in forward_passes(TREE, models, modes, choice)]


def edit(run, old, new):
    text = run.quant_config.read_text()
    assert old in text
    run.quant_config.write_text(text.replace(old, new))


# -- modes -----------------------------------------------------------------------------------------


def test_a_mode_has_its_types_and_no_quantizer_of_the_run(run, described):
    described.clear()  # the checkpoint is not read
    first, second = passes(run, "FA_linear_mxfp8", "bf16")
    types = {"fprop": "mxfp8", "qk": "mxfp8", "pv": "none"}
    assert first == ForwardPass("FA_linear_mxfp8", types, {}, ())
    assert (first.name, first.all_types) == ("FA_linear_mxfp8", {"mxfp8", "none"})
    assert second.all_types == {"none"}


def test_the_name_of_a_mode_has_the_version_of_its_quantizer(run, write):
    file = write()
    options = ["mine.gain=4.5", "mine.kind=a"]
    first, second = passes(run, "bf16", "linear_mine", files=[file], options=options)
    assert first.plugins == ()
    assert (second.mode, second.types) == ("linear_mine", LINEAR_MINE)
    assert second.name == f"linear_mine {digest_of(file)[:6]} gain=4.5"
    (plugin,) = second.plugins
    assert (plugin.source, plugin.options) == (file, {"gain": 4.5})


def test_all_quantizers_of_a_file_are_registered_and_only_the_used_one_is_named(run, write):
    file = write(function(), function("spare"))
    (quant,) = passes(run, "linear_mine", files=[file])
    assert [plugin.name for plugin in quant.plugins] == ["mine", "spare"]
    assert quant.name == f"linear_mine {digest_of(file)[:6]}"


def test_models_and_modes_are_in_the_order_of_a_table(run, described):
    described["types"] = {}
    models = [SavedModel("a", run.checkpoints, None), SavedModel("b", run.checkpoints, None)]
    pairs = forward_passes(TREE, models, ["mxfp4", AS_TRAINED], NO_OWN_TYPES)
    assert [(model.name, quant.mode) for model, quant in pairs] == [
        *(("a", "mxfp4"), ("a", "bf16")),
        *(("b", "mxfp4"), ("b", "bf16")),
    ]


@pytest.mark.parametrize(
    ("modes", "options", "error", "text"),
    [
        (["mxfp8"], [], PluginError, r"mine\.py changes nothing"),
        (["mxfp8", "bf16"], [], PluginError, r"mine\.py changes nothing"),
        (["mxfp8"], ["mine.gain=3"], PluginError, "changes nothing"),
        (["linear_mine"], ["mine.gian=3"], UnknownNameError, "gian"),
        (["linear_mine"], ["mine.gain=x"], PluginError, "mine.gain=x"),
        (["linear_mine"], ["other.gain=3"], UnknownNameError, "other"),
        (["linear_other"], [], MqoError, "linear_other"),
    ],
)
def test_a_choice_without_effect_is_refused(run, write, modes, options, error, text):
    with pytest.raises(error, match=text):
        passes(run, *modes, files=[write()], options=options)


def test_an_option_without_a_file_is_refused(run, described):
    with pytest.raises(PluginError, match="--plugin FILE"):
        passes(run, "bf16", options=["mine.gain=3"])


# -- as trained ------------------------------------------------------------------------------------


def test_ones_own_run_keeps_its_quantizer_and_its_options(run, described):
    (quant,) = passes(run, AS_TRAINED)
    file = run.plugins / "mine/mine.py"
    assert (quant.mode, quant.types) == ("mine", ALL_MINE)
    assert quant.name == f"mine {digest_of(file)[:6]} gain=3.0"
    (plugin,) = quant.plugins
    assert (plugin.source, plugin.options) == (file, {"gain": 3.0})


def test_quantizers_of_other_phases_are_left_out(run, described):
    """A schedule may end with a format: then no code of the user runs."""
    described["types"] = dict.fromkeys(ALL_MINE, "mxfp8")
    run.origin.unlink()
    (quant,) = passes(run, AS_TRAINED)
    assert (quant.name, quant.plugins) == ("mxfp8", ())


@pytest.mark.parametrize(
    "rows",
    [
        '[operands]\n"fprop.weight" = { quant_type = "mine" }\n',
        '[[rules]]\nlayers = "linear:*"\nquant_type = "mine"\n',
    ],
)
def test_quantizers_of_a_recipe_are_kept(run, described, rows):
    described |= {"types": dict.fromkeys(ALL_MINE, "mxfp8"), "rows": True}
    edit(run, '"mine"\n', '"mxfp8"\n')
    run.quant_config.write_text(run.quant_config.read_text() + rows)
    sign(Project.here(), run)
    (quant,) = passes(run, AS_TRAINED)
    assert quant.all_types >= {"mine", "mxfp8"}
    assert [plugin.name for plugin in quant.plugins] == ["mine"]
    assert quant.name.startswith(f"{AS_TRAINED} {quant.plugins[0].digest[:6]} ")


def foreign(run):
    run.origin.unlink()


def changed(run):
    file = run.plugins / "mine/mine.py"
    file.write_text(file.read_text() + "\n")


def with_a_module(run):
    (run.plugins / "mine/torch.py").write_text("")


@pytest.mark.parametrize("change", [foreign, changed, with_a_module])
def test_the_code_of_another_person_is_refused(run, described, change):
    change(run)
    with pytest.raises(CheckpointError, match=f"{run.root} was not made here") as caught:
        passes(run, AS_TRAINED)
    assert str(run.plugins / "mine/mine.py") in caught.value.help
    assert passes(run, "bf16")[0].plugins == ()


def test_a_given_file_replaces_that_of_the_run_and_keeps_its_options(run, described, write):
    foreign(run)
    file = write()
    (quant,) = passes(run, AS_TRAINED, files=[file])
    (plugin,) = quant.plugins
    assert (plugin.source, plugin.options) == (file, {"gain": 3.0})
    (quant,) = passes(run, AS_TRAINED, files=[file], options=["mine.gain=7", "mine.kind=b"])
    assert quant.plugins[0].options == {"gain": 7.0, "kind": "b"}


def test_another_quantizer_does_not_make_the_run_ones_own(run, described, write):
    foreign(run)
    file = write(function("other"), path="given/other.py")
    with pytest.raises(CheckpointError, match="quantizer mine"):
        passes(run, AS_TRAINED, "linear_other", files=[file])
    sign(Project.here(), run)
    with pytest.raises(PluginError, match=r"other\.py changes nothing"):
        passes(run, AS_TRAINED, files=[file])


@pytest.mark.parametrize("options", ["{}", '{"gian": 2.0}', '{"gain": 2}', '{"gain": "2.0"}'])
def test_a_version_without_the_options_of_the_run_is_refused(run, described, write, options):
    with pytest.raises(PluginError, match=r"mine\.py does not fit first: .*gain"):
        passes(run, AS_TRAINED, files=[write(function(options=options))])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('file = "plugins/mine/mine.py"\n', ""),
        ('file = "plugins/mine/mine.py"', "file = 3"),
        ('file = "plugins/mine/mine.py"', 'file = "../mine.py"'),
        ('file = "plugins/mine/mine.py"', 'file = "/mine.py"'),
        ("[plugins.mine.declared]\n", "[plugins.mine.declared]\nblok = 16\n"),
        ("[plugins.mine.declared]\n", "[plugins.mine.declared]\nblock = 'a'\n"),
        ("[plugins.mine.declared]\n", "[plugins.mine.declared]\nstate = 3\n"),
        ("[plugins.mine.declared]\n", "[plugins.mine.declared]\nstate = { a = 'x' }\n"),
        ("gain = 3.0", "gian = 3.0"),
        ("gain = 3.0", "gain = '3.0'"),
        ("plugins.mine", "plugins.mxfp8"),
        ("plugins.mine", "plugins.'My quantizer'"),
        ("[plugins.mine.options]", "[plugins.other]\noptions = 3\n[plugins.mine.options]"),
        ("[plugins.mine.options]", "[plugins.other]\ndeclared = []\n[plugins.mine.options]"),
        ("[asked]", "plugins = 3\n[not_asked]"),
        ("digest = ", "digest = 3 # "),
    ],
)
def test_damaged_rows_are_named_as_those_of_the_run(run, described, old, new):
    edit(run, old, new)
    with pytest.raises(RunError, match=rf"{run.quant_config} cannot be read") as caught:
        passes(run, AS_TRAINED)
    assert "\n" not in str(caught.value)


def test_an_unknown_type_is_refused_in_one_paragraph(run, described, write):
    described["types"] = LINEAR_MINE | {"fprop": "gone"}
    with pytest.raises(CheckpointError, match="the type gone, which is unknown") as caught:
        passes(run, AS_TRAINED)
    assert "\n" not in str(caught.value) and "--plugin FILE" in str(caught.value)
    file = write(function("gone"), path="given/gone.py")
    assert passes(run, AS_TRAINED, files=[file])[0].plugins[0].name == "gone"


def test_a_checkpoint_without_a_run_needs_the_file(run, described, write, tmp_path):
    alone = run.checkpoints.rename(tmp_path / "alone")
    models = [SavedModel.find(alone)]
    assert models[0].quant_config is None
    with pytest.raises(CheckpointError, match="mine"):
        forward_passes(TREE, models, [AS_TRAINED], NO_OWN_TYPES)
    choice = OwnTypes.from_options(plugins=[write()])
    ((_, quant),) = forward_passes(TREE, models, [AS_TRAINED], choice)
    assert (quant.types, quant.plugins[0].options) == (ALL_MINE, {})
    # In the version and with the options that it was trained with.
    described["plugins"] = {"mine": f"version {quant.plugins[0].digest[:6]}, gain 4.0"}
    with pytest.raises(CheckpointError, match=r"gain 4\.0, and .*mine\.py has version"):
        forward_passes(TREE, models, [AS_TRAINED], choice)
    choice = OwnTypes.from_options(plugins=[write()], options=["mine.gain=4.0"])
    ((_, quant),) = forward_passes(TREE, models, [AS_TRAINED], choice)
    assert quant.plugins[0].options == {"gain": 4.0}


def test_a_run_without_a_record_is_unquantized(run, described):
    described["types"] = {}
    assert passes(run, AS_TRAINED)[0].types == dict.fromkeys(ALL_MINE, "none")


def test_quantizers_of_two_runs_do_not_mix(run, described, project, tmp_path, write):
    """The second run has another version and other options."""
    file = write(function(options='{"gain": 1.0}'), path="runs/second/plugins/mine/mine.py")
    rows = rows_of(file).replace('{ gain = 2.0, kind = "a" }', "{ gain = 1.0 }")
    other = signed_run(project, tmp_path / "runs/second", rows)
    models = [SavedModel.find(folder.root) for folder in (run, other)]
    pairs = forward_passes(TREE, models, [AS_TRAINED], NO_OWN_TYPES)
    assert [quant.plugins[0].source.parts[-4] for _, quant in pairs] == ["first", "second"]
    assert [quant.plugins[0].declared["options"]["gain"] for _, quant in pairs] == [2.0, 1.0]


# -- formats of the user ---------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """A function that chooses a file whose format has blocks of this size."""

    def choose(block=32):
        file = tmp_path / "own.toml"
        file.write_text(FILE.replace("block = 32", f"block = {block}"))
        return OwnTypes.from_options([file])

    return choose


@pytest.fixture
def of_format(run, described, own):
    """A run with a user's format, whose file is not given."""
    rows = format_rows(own().rows)
    OWN.clear()
    del FORMATS["own7"]
    types = dict.fromkeys(("fprop", "dgrad", "wgrad", "qk", "pv"), "own7")
    run.quant_config.write_text(quant_toml(types, {}, formats=rows))
    described["types"] = types
    return run


def test_a_run_brings_its_formats(of_format):
    (trained,) = passes(of_format, AS_TRAINED)
    assert trained.name == f"own7 {trained.formats['own7'].version}"
    assert FORMATS["own7"].block == 32
    assert passes(of_format, "mxfp8")[0].formats == {}


def test_a_given_format_is_that_of_a_mode_and_has_to_be_that_of_the_training(of_format, own):
    same, other = own(32), own(16)
    (trained,) = passes(of_format, AS_TRAINED, choice=same)
    (mode,) = passes(of_format, "linear_own7", choice=other)
    assert trained.formats == same.rows and mode.formats == other.rows
    with pytest.raises(FormatError, match="own7"):
        passes(of_format, AS_TRAINED, choice=other)
    with pytest.raises(FormatError, match="changes nothing"):
        passes(of_format, "mxfp8", choice=same)


def test_a_checkpoint_alone_needs_the_file_of_its_format(of_format, described, own, tmp_path):
    models = [SavedModel.find(of_format.checkpoints.rename(tmp_path / "alone"))]
    with pytest.raises(CheckpointError, match="--formats FILE"):
        forward_passes(TREE, models, [AS_TRAINED], NO_OWN_TYPES)
    choice = own()
    described["formats"] = {"own7": choice.rows["own7"].digest}
    ((_, quant),) = forward_passes(TREE, models, [AS_TRAINED], choice)
    assert quant.formats == choice.rows
    with pytest.raises(FormatError, match="own7"):
        forward_passes(TREE, models, [AS_TRAINED], own(16))


@pytest.mark.parametrize(
    ("old", "new"),
    [("block = 32", "block = 16"), ("own7 = {", "mxfp8 = {"), ("row = {", "rows = {")],
)
def test_damaged_formats_are_named_as_those_of_the_run(of_format, old, new):
    edit(of_format, old, new)
    with pytest.raises(RunError, match=rf"{of_format.quant_config} cannot be read"):
        passes(of_format, AS_TRAINED)
