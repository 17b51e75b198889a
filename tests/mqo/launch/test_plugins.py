"""The custom quantizers in a run: which it keeps, their options, and the copies of files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.errors import MqoError, PluginError, RunError, UnknownNameError
from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.machine import imagined
from mqo.launch.own_types import OwnTypes
from mqo.launch.plan import layout_of, plan_layout
from mqo.launch.plugins import copy_files, plugins_of, used
from mqo.quant.config import parse
from mqo.quant.plugin_modules import digest_of
from mqo.quant.plugins import PLUGINS
from mqo.recipes import recipe as recipes
from mqo.recipes.quantizers import declare_file
from mqo.runs import RunFolder

OPTIONS = ', options={"on": True, "count": 3, "gain": 2.0, "kind": "a"}'


def function(name, rest=""):
    return f'@quantizer("{name}"{rest})\ndef {name}(x, context):\n    return x\n'


@pytest.fixture
def write(write_quantizers):
    """A function that writes a file of quantizers into a folder."""
    return lambda *functions, name="mine.py", head="": write_quantizers(
        *functions, path=f"a folder/{name}", head=head
    )


@pytest.fixture
def mine(write):
    return write(function("mine", OPTIONS))


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "a run")
    folder.root.mkdir()
    return folder


def cell(mode, *files, options=(), **rest):
    return resolve(
        *("llama32-1b", "wikipedia", mode, "tiny"), plugins=files, plugin_options=options, **rest
    )


# -- files -----------------------------------------------------------------------------------------


def test_a_file_becomes_the_quantizers_that_it_declares(write):
    path = write(function("mine", ", block=16, needs_amax=True"), function("other"))
    mine, other = plugins_of([path])
    assert (mine.name, mine.source, mine.digest) == ("mine", path, digest_of(path))
    assert mine.file == other.file == "plugins/mine/mine.py"
    assert mine.declared == {"block": 16, "needs_tensor_amax": True} and other.declared == {}
    assert {name: plugin.function for name, plugin in PLUGINS.items()} == {
        "mine": None,
        "other": None,
    }


def test_a_file_that_is_named_twice_counts_once(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to(mine)
    names = [mine, mine.relative_to(tmp_path), tmp_path / "link.py", tmp_path / "x/.." / "link.py"]
    assert [plugin.source for plugin in plugins_of(names)] == [mine]


def test_two_files_of_one_name_are_refused(write):
    """Their copies would have one place."""
    files = [write(function(kind), name=f"{kind}/same.py") for kind in ("mine", "other")]
    with pytest.raises(PluginError, match=r"mine/same\.py"):
        plugins_of(files)


def test_two_files_with_one_quantizer_are_refused(write):
    files = [write(function("mine"), name=f"{name}.py") for name in ("first", "second")]
    with pytest.raises(PluginError, match="quantizer mine"):
        plugins_of(files)


@pytest.mark.parametrize("text", ["x = 1\n", "x = (\n", '@quantizer("mxfp4")\ndef f(x, c): ...\n'])
def test_a_faulty_file_is_refused(write, text):
    path = write(text)
    for read in (plugins_of, lambda files: OwnTypes.from_options(plugins=files)):
        with pytest.raises(PluginError, match=r"mine\.py"):
            read([path])


def test_a_helper_that_is_not_python_is_refused(write):
    path = write(function("mine"), head="import helper\n")
    path.with_name("helper.py").write_text("x = (\n")
    with pytest.raises(PluginError, match=r"helper\.py"):
        plugins_of([path])


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "options", "label"),
    [
        (["mine.on=false"], {"on": False}, "on=false"),
        (["mine.count=-7"], {"count": -7}, "count=-7"),
        (["mine.gain=4"], {"gain": 4.0}, "gain=4.0"),
        (["mine.gain=1e-3"], {"gain": 0.001}, "gain=0.001"),
        (["mine.kind=b=c d"], {"kind": "b=c d"}, "kind=b=c d"),
        (["mine.kind="], {"kind": ""}, "kind="),
        ([" mine.kind = b "], {"kind": "b"}, "kind=b"),
        (["mine.kind=3"], {"kind": "3"}, "kind=3"),
        (["mine.kind=b", "mine.count=4"], {"kind": "b", "count": 4}, "count=4 kind=b"),
        (["mine.count=4", "mine.count=5"], {"count": 5}, "count=5"),
        (["mine.count=4", "mine.count=3"], {}, ""),
        (["mine.on=true", "mine.count=3", "mine.gain=2", "mine.kind=a"], {}, ""),
    ],
)
def test_a_text_is_a_value_of_the_defaults_type(mine, texts, options, label):
    (plugin,) = plugins_of([mine], texts)
    assert plugin.options == options
    kinds = {name: type(value) for name, value in PLUGINS["mine"].options.items()}
    assert all(type(value) is kinds[name] for name, value in plugin.options.items())
    assert plugin.label == " ".join(filter(None, (digest_of(mine)[:6], label)))


@pytest.mark.parametrize(
    "text",
    [
        *("", "mine", "mine.gain", "gain=3", "mine.=3", ".gain=3", "=3", "mine=3.gain"),
        *("mine.on=True", "mine.on=1", "mine.on=", "mine.count=3.0", "mine.count=", "mine.count=x"),
        *("mine.gain=x", "mine.gain=", "mine.gain=nan", "mine.gain=inf", "mine.gain=1e999"),
        *(
            f"mine.count={1 << 70}",
            "mine.count=" + "9" * 5000,
            "mine.kind=a\nb",
            "mine.kind=\udcff",
        ),
    ],
)
def test_an_invalid_text_is_refused(mine, text):
    with pytest.raises(PluginError):
        plugins_of([mine], [text])


@pytest.mark.parametrize(
    ("text", "valid"),
    [("mine.gian=3", "gain"), ("mine.gain.more=3", "gain"), ("other.gain=3", "mine")],
)
def test_an_unknown_name_lists_the_valid_ones(mine, text, valid):
    with pytest.raises(UnknownNameError, match=valid):
        plugins_of([mine], [text])


def test_an_option_without_any_file_is_refused():
    with pytest.raises(MqoError, match="--plugin"):
        plugins_of([], ["mine.gain=3"])


# -- what a run uses -------------------------------------------------------------------------------


def test_a_run_keeps_the_files_of_which_it_uses_one(write):
    first = write(function("mine"), function("unused"), name="first.py")
    second = write(function("other"), name="second.py")
    plugins = plugins_of([first, second])
    assert used(plugins, {"mine", "none"}) == plugins[:2]
    assert used(plugins, {"other"}) == plugins[2:]
    assert used(plugins, {"mxfp8"}) == ()
    assert [p.name for p in cell("linear_mine", first, second).quantization.plugins] == [
        *("mine", "unused"),
    ]
    assert cell("linear_mxfp8", first, second).quantization.plugins == ()


def test_a_file_or_an_option_that_no_run_uses_is_refused(write):
    first = write(function("mine", OPTIONS), function("unused", OPTIONS), name="first.py")
    second = write(function("other"), name="second.py")
    files, options = [first, second], ["mine.gain=3"]
    runs = [cell(mode, *files, options=options).quantization for mode in ("mine", "FA_other")]
    OwnTypes(plugins=files, options=options).refuse_unused(runs)
    with pytest.raises(PluginError, match=r"second\.py .*other"):
        OwnTypes(plugins=files, options=options).refuse_unused(runs[:1])
    with pytest.raises(PluginError, match=r"mine\.gain=3"):
        OwnTypes(plugins=(second,), options=options).refuse_unused(runs[1:])
    with pytest.raises(PluginError, match=r"unused\.gain=3"):
        OwnTypes(plugins=files, options=("unused.gain=3",)).refuse_unused(runs)


# -- configurations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "rest", "types"),
    [
        ("linear_mine", {}, {"fprop": "mine"}),
        ("linear_mine", {"gemms": "all"}, dict.fromkeys(("fprop", "dgrad", "wgrad"), "mine")),
        ("FA_mine", {}, {"qk": "mine"}),
        ("mine", {}, dict.fromkeys(("fprop", "qk", "pv"), "mine")),
        ("bf16", {"attention": "qk_pv_mine"}, dict.fromkeys(("qk", "pv"), "mine")),
        ("FA_mxfp8", {"linear": "mine"}, {"fprop": "mine", "qk": "mxfp8"}),
        ("FA_linear_mxfp8", {"attention": "mine"}, {"fprop": "mxfp8", "qk": "mine"}),
    ],
)
def test_a_mode_may_name_a_quantizer(mine, mode, rest, types):
    config = cell(mode, mine, **rest)
    kinds = config.quantization.types
    assert {site: kind for site, kind in kinds.items() if kind != "none"} == types
    assert "mine" in config.quantization.all_types
    PLUGINS.clear()
    assert parse(config.quant_toml(kinds)).asked == kinds


def test_a_schedule_may_name_a_quantizer(mine):
    config = cell("linear_mxfp8", mine, schedule=("linear: mxfp8 until 3, then mine",))
    assert [plugin.name for plugin in config.quantization.plugins] == ["mine"]
    PLUGINS.clear()
    options = parse(config.quant_toml(config.quantization.types))
    assert [phase.quant_type for phase in options.phases("fprop")] == ["mxfp8", "mine"]


def test_a_recipe_may_name_a_quantizer_of_the_command(mine, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'types = { fprop = "mxfp8" }\n[[rules]]\nfirst = 1\nquant_type = "mine"\n'
        '[operands]\n"fprop.x" = { quant_type = "mine" }\n'
    )
    declare_file(mine)
    config = cell("bf16", mine, recipe=recipes.read(str(path)), options=["mine.gain=3"])
    assert "gain=3.0" in config.quantization.name
    text = config.quant_toml(config.quantization.types)
    PLUGINS.clear()
    options = parse(text)
    for layer, operand in (("decoder.layers.0.a", "weight"), ("decoder.layers.1.a", "x")):
        spec = options.operand_spec("fprop", operand, layer, "mxfp8").spec
        assert (spec.quant_type, dict(spec.options)["gain"]) == ("mine", 3.0)
    assert options.operand_type("fprop", "weight", "decoder.layers.1.a", "mxfp8") == "mxfp8"


def test_the_name_of_a_run_has_the_version_and_the_options(mine):
    plain, tuned = cell("linear_mine", mine), cell("linear_mine", mine, options=["mine.on=false"])
    version = digest_of(mine)[:6]
    assert plain.quantization.name == f"linear_mine {version}"
    assert tuned.quantization.name == f"linear_mine {version} on=false"
    assert version in plain.title and " " not in tuned.title
    mine.write_text(mine.read_text() + "# changed\n")
    assert cell("linear_mine", mine).quantization.name != plain.quantization.name
    assert cell("linear_mxfp8", mine).quantization.name == "linear_mxfp8"


def test_the_name_of_a_run_leaves_out_what_its_types_do_not_name(write):
    path = write(function("mine", OPTIONS), function("unused", OPTIONS))
    name = cell("linear_mine", path, options=["mine.count=4"]).quantization.name
    assert name == f"linear_mine {digest_of(path)[:6]} count=4"


READ = """
import sys
from pathlib import Path
from mqo.launch.config import RunConfig
from mqo.quant.config import parse
from mqo.quant.plugins import PLUGINS
from mqo.recipes.quantizers import declare_file
from mqo.runs import RunFolder
config = RunConfig.read(RunFolder(Path(sys.argv[1])))
assert PLUGINS["mine"].function is None and "torch" not in sys.modules
spec = parse(config.quant_toml(config.quantization.types)).spec("mine")
print(config.quantization.name, config.model_dump_json(indent=1), sorted(spec.options), sep="\\n@")
"""


def test_a_run_is_read_where_its_file_is_gone(mine, run):
    options = ["mine.gain=4", "mine.kind='é\"\\"]
    config = cell("FA_linear_mine", mine, gemms="all", options=options)
    config.write(run)
    shutil.rmtree(mine.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", READ, run.root]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    name, written, spec = done.stdout.split("\n@")
    assert name == config.quantization.name
    assert written == run.config.read_text()
    assert spec.strip() == str([("count", 3), ("gain", 4.0), ("kind", "'é\"\\"), ("on", True)])
    PLUGINS.clear()
    assert RunConfig.read(run) == config


DAMAGES = {
    "a number": ('"plugins":[{', '"plugins":5,"x":[{'),
    "a table": ('"plugins":[{', '"plugins":{"a":[]},"x":[{'),
    "numbers": ('"plugins":[{', '"plugins":[5,{'),
    "another type": ('"name":"mine"', '"name":"mxfp8"'),
    "no name": ('"name":"mine"', '"name":null'),
    "a file elsewhere": ('"file":"plugins', '"file":"/plugins'),
    "a file above": ('"file":"plugins', '"file":"../plugins'),
    "an unknown argument": ('"declared":{', '"declared":{"blok":16,'),
    "a declaration of another kind": ('"declared":{', '"declared":[5],"x":{'),
    "a value of another kind": ('"gain":4.0', '"gain":"4"'),
    "no value": ('"gain":4.0', '"gain":null'),
    "an unknown option": ('"gain":4.0', '"gian":4.0'),
    "a number beyond JSON": ('"gain":4.0', '"gain":1e999'),
}


@pytest.mark.parametrize(("old", "new"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_refused(mine, run, old, new):
    config = cell("bf16", mine, linear="mine", options=["mine.gain=4"], schedule=("qk: mine",))
    text = config.model_dump_json()
    assert text.count(old) == 1
    PLUGINS.clear()
    run.config.write_text(text.replace(old, new))
    with pytest.raises(RunError, match=re.escape(str(run.config))):
        RunConfig.read(run)
    assert all(plugin.function is None for plugin in PLUGINS.values())


@pytest.mark.parametrize("mode", ["linear_mine", "FA_mine", "mine"])
def test_a_layout_on_gpus_is_planned_for_a_quantizer(mine, mode):
    """Its values are kept as those of a format without codes."""
    where = Cluster(nproc_per_node=8)
    names = ("llama31-8b", "wikipedia", mode, "standard")
    config = resolve(*names, plugins=[mine], gemms="all", cluster=where)
    machine = imagined("h100-80gb", 8)
    planned, _ = plan_layout(Path("unread"), config, machine, config.quantization.types)
    assert layout_of(planned.placement.layout, 8).gpus == 8


# -- copies ----------------------------------------------------------------------------------------


@pytest.fixture
def package(write):
    """A file with a helper module and a package."""
    path = write(function("mine"), head="import helper\nfrom own_package.part import X\n")
    folder = path.parent
    (folder / "own_package").mkdir()
    for name in ("helper.py", "own_package/__init__.py", "own_package/part.py", "not_imported.py"):
        (folder / name).write_text(f"# {name}\n")
    (folder / "own_package" / "__pycache__").mkdir()
    return path


def copies(run):
    return {str(p.relative_to(run.plugins)): p.read_bytes() for p in run.plugins.rglob("*.*")}


def test_a_run_gets_the_file_and_the_modules_that_it_imports(package, run):
    copy_files(plugins_of([package]), run)
    names = ("mine.py", "helper.py", "own_package/__init__.py", "own_package/part.py")
    assert copies(run) == {f"mine/{name}": (package.parent / name).read_bytes() for name in names}
    (plugin,) = plugins_of([package])
    assert digest_of(run.root / plugin.file) == plugin.digest


def test_helpers_of_one_name_have_two_places(write, run):
    for name in ("first", "second"):
        path = write(function(name), name=f"{name}/{name}.py", head="import helper\n")
        path.with_name("helper.py").write_text(f"# of {name}\n")
    copy_files(plugins_of([path.parents[1] / f"{n}/{n}.py" for n in ("first", "second")]), run)
    assert copies(run)["first/helper.py"] == b"# of first\n"
    assert copies(run)["second/helper.py"] == b"# of second\n"


def test_a_run_without_quantizers_of_the_user_has_no_folder_of_them(run):
    copy_files((), run)
    assert not run.plugins.exists()


def changed(path):
    path.write_text(path.read_text() + "x = 1\n")


def not_python(path):
    path.write_text("x = (\n")


def gone(path):
    path.unlink()


@pytest.mark.parametrize("change", [changed, not_python, gone])
@pytest.mark.parametrize("name", ["mine.py", "helper.py"])
def test_a_file_that_changed_after_the_plan_is_refused(package, run, name, change):
    plugins = plugins_of([package])
    change(package.with_name(name))
    with pytest.raises(PluginError, match="changed"):
        copy_files(plugins, run)


@pytest.fixture
def module(write):
    """A module of a package, which imports from it."""
    write("", name="own/__init__.py")
    write("", name="own/helper.py")
    write("", name="own/unused.py")
    return write(function("mine"), name="own/sub/mine.py", head="from ..helper import a\n")


def test_the_copy_of_a_module_has_the_layout_of_its_package(module, write, run):
    write("", name="own/sub/__init__.py")
    (plugin,) = plugins_of([module])
    assert plugin.file == "plugins/own.sub.mine/own/sub/mine.py"
    copy_files([plugin], run)
    names = ["own", "own/__init__.py", "own/helper.py", "own/sub", "own/sub/__init__.py"]
    below = run.plugins / "own.sub.mine"
    copied = sorted(str(path.relative_to(below)) for path in below.rglob("*"))
    assert copied == [*names, "own/sub/mine.py"]
    assert digest_of(run.root / plugin.file) == plugin.digest
    again = plugin.model_copy(update={"source": run.root / plugin.file})
    other = RunFolder(run.root.with_name("another run"))
    copy_files([again], other)  # as an evaluation does
    assert digest_of(other.root / plugin.file) == plugin.digest


def test_a_module_without_its_package_is_refused(module):
    with pytest.raises(PluginError, match=r"\.\.helper in line 3, and is in no package"):
        plugins_of([module])


def test_modules_of_two_packages_may_have_one_name(write):
    for package in ("first", "second"):
        write("", name=f"{package}/__init__.py")
    files = [write(function(p), name=f"{p}/same.py") for p in ("first", "second")]
    assert [plugin.file for plugin in plugins_of(files)] == [
        *("plugins/first.same/same.py", "plugins/second.same/same.py"),
    ]
