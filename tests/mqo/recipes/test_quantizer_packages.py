"""Quantizers that installed packages offer: their files, without an import of a package."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from mqo.errors import PluginError
from mqo.launch.arguments import config_from, parser
from mqo.launch.own_types import OwnTypes
from mqo.launch.plugins import copy_files
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugins import PLUGINS
from mqo.recipes.quantizer_packages import file_of, files_of, packages
from mqo.runs import RunFolder

HEAD = "from mqo.quant import quantizer\n"
BODY = "def mine(x, context):\n    return x\n"
DECORATOR = '@quantizer("mine", block=16, options={"bits": 4})\n'


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, whose modules make a marker if they are run."""
    folder, marker, before = tmp_path / "site", tmp_path / "it ran", {*sys.modules}
    folder.mkdir()
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.syspath_prepend(folder)
    yield folder
    assert not marker.exists()
    assert not [name for name in sys.modules.keys() - before if name.startswith("bits")]


def install(site, entries, modules=(), distribution="bits", folder=None, **files):
    """Install a distribution with these entry points, and modules that say that they were run."""
    facts = site / f"{distribution}-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (facts / "entry_points.txt").write_text(f"[mqo.quantizers]\n{lines}")
    marker = site.parent / "it ran"
    for name in modules:
        path = (folder or site) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{HEAD}{DECORATOR}{BODY}" if path.stem.startswith("mine") else ""
        path.write_text(f"open({str(marker)!r}, 'w')\n{text}")
    (facts / "RECORD").write_text("".join(f"{name},,\n" for name in modules))
    for name, text in files.items():
        (facts / name.replace("_json", ".json")).write_text(text)


PACKAGE = ("bits/__init__.py", "bits/sub/__init__.py", "bits/sub/mine.py")


@pytest.mark.parametrize("value", ["bits.sub.mine", "bits.sub.mine:mine", " bits.sub.mine : mine "])
def test_an_entry_point_names_the_file_of_a_module(site, value):
    install(site, {"four-bits": value}, PACKAGE)
    assert file_of(Path("four-bits")) == site / "bits/sub/mine.py"
    (package,) = packages()
    assert (package.name, package.label) == ("four-bits", "bits 1.2")


def test_a_package_and_a_module_at_the_top_have_files_too(site):
    install(site, {"a": "bits.mine", "b": "bits_of", "c": "bits"}, [
        *("bits/__init__.py", "bits/mine/__init__.py", "bits_of.py"),
    ])  # fmt: skip
    assert files_of(map(Path, "abc")) == (
        site / "bits/mine/__init__.py",
        site / "bits_of.py",
        site / "bits/__init__.py",
    )


def test_a_file_of_this_name_comes_first(site):
    install(site, {"mine.py": "bits.sub.mine", "folder": "bits.sub.mine"}, PACKAGE)
    installed = site / "bits/sub/mine.py"
    assert file_of(Path("mine.py")) == installed
    Path("mine.py").write_text("")
    Path("folder").mkdir()
    assert file_of(Path("mine.py")) == Path("mine.py")
    assert file_of(Path("folder")) == installed


def test_a_name_that_is_neither_is_refused_with_the_known_ones(site):
    with pytest.raises(PluginError, match=r"no file none.*\. Expected: a file of Python\."):
        file_of(Path("none"))
    install(site, {"one": "bits.sub.mine", "two": "bits.sub.mine"}, PACKAGE)
    for word in ("none", "none.of", "x" * 300):
        with pytest.raises(PluginError, match="a file of Python, or one of one, two"):
            file_of(Path(word))
    for word in ("none.py", "folder/none"):  # names of files: reading them is refused
        assert file_of(Path(word)) == Path(word)


@pytest.mark.parametrize("name", ["src", "."])
def test_an_editable_install_says_where_its_project_is(site, tmp_path, name):
    project = tmp_path / "a project é"
    facts = {"url": project.as_uri(), "dir_info": {"editable": True}}
    where = {"folder": project / name, "direct_url_json": json.dumps(facts)}
    install(site, {"mine": "bits.sub.mine"}, PACKAGE, **where)
    assert file_of(Path("mine")) == project / name / "bits/sub/mine.py"


@pytest.mark.parametrize(
    "facts",
    [
        *({}, {"url": "https://host/a.git", "dir_info": {"editable": True}}, [], {"url": 3}),
        {"url": "file:///nothing", "dir_info": {}},
        {"url": "file:///nothing", "dir_info": {"editable": True}},
    ],
)
def test_a_module_that_is_nowhere_is_refused(site, facts):
    install(site, {"mine": "bits.sub.mine"}, direct_url_json=json.dumps(facts))
    with pytest.raises(PluginError, match=r"mine of bits 1\.2 .* bits\.sub\.mine, which is not in"):
        file_of(Path("mine"))


@pytest.mark.parametrize("value", ["", "../other", "bits..mine", "/bits", "bits mine", ":mine"])
def test_a_value_that_is_no_module_is_refused(site, value):
    install(site, {"mine": value}, PACKAGE)
    with pytest.raises(PluginError, match="which is not a name"):
        file_of(Path("mine"))


def test_a_folder_that_is_no_package_is_refused(site):
    install(site, {"mine": "bits.sub.mine"}, PACKAGE[1:])
    with pytest.raises(PluginError, match=r"bits has no __init__\.py"):
        file_of(Path("mine"))


def test_a_name_of_two_distributions_is_refused(site):
    install(site, {"mine": "bits.sub.mine"}, PACKAGE)
    install(site, {"mine": "other"}, distribution="other")
    with pytest.raises(PluginError, match=r"bits 1\.2 and other 1\.2 both offer quantizers mine"):
        file_of(Path("mine"))


# -- commands --------------------------------------------------------------------------------------


def test_commands_take_the_name_of_an_entry_point(site):
    install(site, {"four-bits": "bits.sub.mine"}, PACKAGE)
    own = OwnTypes.from_options(plugins=[Path("four-bits")])
    assert own.plugins == (site / "bits/sub/mine.py",)
    assert PLUGINS["mine"].block == 16 and PLUGINS["mine"].function is None


@pytest.mark.parametrize("first", ["", "from .helper import N\n", "from bits import sub\n"])
def test_a_run_has_a_copy_that_can_be_run(site, tmp_path, first):
    """Also without the package."""
    install(site, {"four-bits": "bits.sub.mine"}, PACKAGE)
    for name in PACKAGE:
        (site / name).write_text("")
    (site / "bits/sub/helper.py").write_text("N = 3\n")
    path = site / "bits/sub/mine.py"
    path.write_text(f"{first}{HEAD}{DECORATOR}{BODY}")
    words = ["--model", "llama32-1b", "--dataset", "wikipedia", "--training-config", "tiny"]
    words += ["--quantization", "linear_mine", "--plugin", "four-bits"]
    config = config_from(parser().parse_args(words), [])
    (plugin,) = config.quantization.plugins
    assert plugin.source == path
    run = RunFolder(tmp_path / "a run")
    copy_files([plugin], run)
    shutil.rmtree(site)
    try:
        assert load_quantizers(run.root / plugin.file) == ["mine"]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "bits"]:
            del sys.modules[name]


def test_the_list_has_each_entry_point_and_what_it_declares(site, command_line):
    assert command_line("plugin", "list")[:2] == (0, "no installed package offers quantizers\n")
    install(site, {"mine": "bits.sub.mine", "gone": "bits.gone", "none": "bits"}, PACKAGE)
    code, text, _ = command_line("plugin", "list")
    assert code == 0
    gone, mine, none = text.rstrip().split("\n\n")
    assert mine.splitlines() == [
        f"mine (bits 1.2): {site / 'bits/sub/mine.py'}",
        "    mine  block=16  options={'bits': 4}",
    ]
    assert gone.startswith("gone (bits 1.2): no file\n    The quantizers gone of bits 1.2 are in")
    assert "has no function with @quantizer" in none
    rows = json.loads(command_line("plugin", "list", "--json")[1])["packages"]
    assert [row["name"] for row in rows] == ["gone", "mine", "none"]
    assert rows[1] == {
        "name": "mine",
        "distribution": "bits",
        "version": "1.2",
        "module": "bits.sub.mine",
        "file": str(site / "bits/sub/mine.py"),
        "quantizers": {"mine": {"block": 16, "options": {"bits": 4}}},
        "fault": "",
    }
    assert [bool(row["fault"]) for row in rows] == [True, False, True]
