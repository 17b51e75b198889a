"""Trees, their records and wheels as a broken disk leaves them: used, mended or left alone."""

import pytest
from mqo import pip
from mqo.commands import quant_type_modifier as modifier
from mqo.errors import SetupError
from mqo.overlay.tree import sha256

from ..conftest import FILES, contents
from ..damage import attempt
from .conftest import PIN, WHEEL, wheel
from .quant_types.lookalike import ATTENTION, LAYERS, attention, layers, write


@pytest.fixture
def a_patched_tree(patched, mqo, tmp_path):
    """Its files and records, and every command that reads or writes them."""
    patched.edit("core/plain.py", b"42", b"43")
    made = tmp_path / "made"
    names = ("status", "diff", "apply", "restore")
    return (
        mqo,
        patched.tree.root,
        [("snapshot", made), *((n,) for n in names), ("apply", "--force")],
    )


@pytest.fixture
def a_wheel(mini, mqo, tmp_path, monkeypatch):
    """A wheel that UPSTREAM.toml pins, whatever was done to it, and a checkout beside it."""
    place = tmp_path / "sound" / "wheels"
    place.mkdir(parents=True)
    (place / WHEEL).write_bytes(wheel(FILES))
    write(place / "checkout", FILES)
    (tmp_path / "Megatron-LM").mkdir()

    def download(*rest, **options):
        raise SetupError("there is no network")

    def run(*words):
        content = (place / WHEEL).read_bytes() if (place / WHEEL).is_file() else b""
        text = PIN.replace(sha256(wheel(FILES)), sha256(content))
        (tmp_path / "Megatron-LM/UPSTREAM.toml").write_text(text)
        return mqo(*words)

    monkeypatch.setattr(pip, "download", download)
    vendor = ("vendor", "--force", "--from")
    return run, place, [(*vendor, place / WHEEL), (*vendor, place / "checkout")]


@pytest.fixture
def a_tree_of_ones_own(tmp_path, capsys):
    """A tree patched by hand, one of whose types was set, and what quant_type_modifier.py does."""
    place = write(tmp_path / "sound" / "tree", {LAYERS: layers(), ATTENTION: attention()})

    def run(*words):
        code = modifier.main([*words, "--tree", str(place)])
        return code, *capsys.readouterr()

    assert run("--dgrad-quant", "mxfp4")[0] == 0
    check, dry = ("--check",), ("--linear-quant", "nvfp4", "--dry-run")
    return run, place, [check, dry, ("--qk-quant", "mxfp8"), (*check, "--json"), ("--restore",)]


@pytest.mark.parametrize("seeds", [6, pytest.param(500, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kind", ["a_patched_tree", "a_wheel", "a_tree_of_ones_own"])
def test_a_damaged_tree_is_no_traceback_and_nothing_is_lost(kind, seeds, request):
    found = attempt(*request.getfixturevalue(kind), range(seeds), look=contents)
    assert found and (seeds == 6 or {0, 2} <= {code for code, _ in found})
