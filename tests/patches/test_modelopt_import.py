"""The trainer's imports of ModelOpt: look-alikes of our own, and the real modules."""

import sys
import textwrap

import pytest
from mqo.project import Project

from .. import forking
from .conftest import planned, sites

PROJECT = Project.here()
SOURCES = {
    "checkpointing.py": """
        try:
            from modelopt.torch.opt.plugins import save_modelopt_state, save_sharded_modelopt_state

            has = True
        except Exception:
            has = False
        """,
    "training.py": """
        try:
            from modelopt.torch.distill.plugins.megatron import (
                get_tensor_shapes_adjust_fn_for_distillation
            )

            has = True
        except ImportError:
            has = False
        """,
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A modelopt that cannot be imported without a trace, and room for a megatron of our own."""
    for package, text in {
        "modelopt": "",
        "modelopt/torch": "",
        "modelopt/torch/opt": "",
        "modelopt/torch/opt/plugins": "save_modelopt_state = save_sharded_modelopt_state = 1",
        "modelopt/torch/distill": "",
        "modelopt/torch/distill/plugins": "",
        "modelopt/torch/distill/plugins/megatron": (
            "get_tensor_shapes_adjust_fn_for_distillation = 1"
        ),
        "megatron": "",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("modelopt", "megatron")]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in ("modelopt", "megatron")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SOURCES)
def test_modelopt_is_imported_where_what_it_is_used_with_is_there(packages, name):
    code = compile(
        sites("modelopt_import", f"megatron/training/{name}", SOURCES[name]), name, "exec"
    )
    scope = {}
    exec(code, scope)
    assert not scope["has"]
    assert "modelopt" not in sys.modules
    (packages / "megatron/post_training").mkdir()
    (packages / "megatron/post_training/__init__.py").touch()
    exec(code, scope)
    assert scope["has"]
    assert "modelopt" in sys.modules


def test_0_20_imports_it_in_one_place_alone():
    paths = ("megatron/training/checkpointing.py", "megatron/training/training.py")
    files = dict.fromkeys(paths, textwrap.dedent(SOURCES["training.py"]).encode())
    assert set(planned("modelopt_import", "0.20.0", files)) == {paths[1]}


@pytest.mark.slow
def test_the_real_trainer_starts_without_it():
    if not (PROJECT.tree / "megatron/training").exists():
        pytest.skip("the tree is not vendored: run `mqo setup`")
    code = (
        "import preflight, sys, megatron.training.training, importlib.util\n"
        "print(importlib.util.find_spec('modelopt') is not None, 'modelopt' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = forking.run(command, cwd=PROJECT.tree)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["True", "False"]
