from types import SimpleNamespace

import pytest
from mqo.overlay.apply import apply
from mqo.overlay.verify.source import compile_faults, restore_faults

from ...conftest import FILES, materialize

PACKAGES = ("megatron/core", "megatron/training")
GADGET = "megatron/core/gadget.py"


def faults_of(mini, source):
    """What is said of the gadget, when upstream's is `source` and a codemod changes the engine."""
    tree = materialize(mini.tree.root, {**FILES, GADGET: source.encode()})
    apply(tree, mini.series)
    return [fault for fault in compile_faults(tree) if fault.startswith(GADGET)]


BOUND = [
    "import new_engine\nold_engine.a\n",
    "from x import y as new_engine\nold_engine.a\n",
    "def f():\n    global new_engine\n    new_engine = 1\nold_engine.a\n",
    "def f(new_engine):\n    return old_engine.a\n",
    "def f():\n    new_engine = 1\n    return lambda: old_engine.a\n",
    "new_engine.b\nold_engine.a\n",
    "\ufeffimport new_engine\nold_engine.a\n",
]
UNBOUND = [
    "old_engine.a\n",
    "def f():\n    new_engine = 1\ndef g():\n    return old_engine.a\n",
    "class C:\n    new_engine = 1\n    def m(self):\n        return old_engine.a\n",
    "x = [old_engine.a for y in z]\n",
]


@pytest.mark.parametrize("source", BOUND)
def test_a_name_that_a_patch_uses_and_the_file_binds_is_sound(mini, source):
    assert faults_of(mini, source) == []


@pytest.mark.parametrize("source", UNBOUND)
def test_a_name_that_a_patch_brings_and_nothing_binds_is_a_fault(mini, source):
    assert faults_of(mini, source) == [f"{GADGET} uses new_engine once patched, without binding it"]


def test_the_projects_own_tree_has_no_fault(vendored):
    assert compile_faults(vendored) == []


def test_an_added_file_that_is_no_python_is_not_compiled():
    files = {"mqo/quant/formats.toml": SimpleNamespace(pristine=None)}
    tree = SimpleNamespace(
        patched=lambda: SimpleNamespace(files=files), read=lambda path: b"[formats]\n1x = 1\n"
    )
    assert compile_faults(tree) == []


def test_what_does_not_compile_is_a_fault(mini):
    (fault,) = faults_of(mini, "def f():\n    return 1\nreturn old_engine.a\n")
    assert "does not compile once patched" in fault


# -- restore -----------------------------------------------------------------------------------


def restored(mini):
    return restore_faults(mini.tree, PACKAGES, FILES)


def test_a_pristine_tree_is_restored(mini):
    assert restored(mini) == []


def test_a_patched_tree_is_not(patched):
    assert restored(patched) == [
        "megatron/core/gadget.py differs from the wheel's after restore",
        "megatron/core/layers.py differs from the wheel's after restore",
        "megatron/training/loop.py differs from the wheel's after restore",
        "the tree counts as patched after restore",
    ]


def test_one_bit_of_a_binary_file_counts(mini):
    mini.edit("core/table.bin", b"\x00\x01", b"\x00\x00")
    assert restored(mini) == ["megatron/core/table.bin differs from the wheel's after restore"]


def test_a_file_that_is_gone_counts(mini):
    mini.path("core/plain.py").unlink()
    assert restored(mini) == ["megatron/core/plain.py differs from the wheel's after restore"]


@pytest.mark.parametrize("name", ["core/new/x.py", "training/.loop.py.mqo-part"])
def test_a_file_that_the_wheel_does_not_hold_counts(mini, name):
    mini.path(name).parent.mkdir(exist_ok=True)
    mini.path(name).write_text("")
    assert restored(mini) == [f"megatron/{name} remains after restore"]


def test_our_own_packages_beside_upstreams_do_not_count(mini):
    mini.path("quant").mkdir()
    mini.path("quant/x.py").write_text("")
    assert restored(mini) == []


def test_the_record_of_the_tree_is_not_believed_where_the_wheel_says_otherwise(mini):
    members = {**FILES, "megatron/core/plain.py": b"answer = 43"}
    assert restore_faults(mini.tree, PACKAGES, members) == [
        "megatron/core/plain.py differs from the wheel's after restore"
    ]
