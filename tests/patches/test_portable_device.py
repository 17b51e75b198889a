import ast
import json
import shutil
import subprocess
import sys

import pytest
from mqo.errors import DriftError
from mqo.overlay.codemod import apply_codemod
from mqo.project import Project

from .conftest import SERIES, codemod

FORMS = {
    # torch.cuda, the expression
    "torch.cuda.synchronize()": "accelerator.synchronize()",
    "d = torch.cuda": "d = accelerator",
    "def f(s: torch.cuda.Stream) -> torch.cuda.Event: ...": (
        "def f(s: accelerator.Stream) -> accelerator.Event: ..."
    ),
    "s: Optional[torch.cuda.Stream] = None": "s: Optional[accelerator.Stream] = None",
    "with torch . cuda.stream(s): pass": "with accelerator.stream(s): pass",
    "s = '∂é'; torch.cuda.init()": "s = '∂é'; accelerator.init()",
    "[torch.cuda.a, torch.cuda.b]": "[accelerator.a, accelerator.b]",
    # f-strings
    "f'{torch.cuda.device_count()} é {x}'": "f'{accelerator.device_count()} é {x}'",
    "f'{a}' f'{torch.cuda.a:>{torch.cuda.b}}'": "f'{a}' f'{accelerator.a:>{accelerator.b}}'",
    """f"{torch.device('cuda', i)}" """: """f"{accelerator_device('cuda', i)}" """,
    """f"{f'{torch.cuda.name}'}" """: """f"{f'{accelerator.name}'}" """,
    # .cuda()
    "x.cuda()": "x.to(accelerator_type())",
    "(a + b).cuda()": "(a + b).to(accelerator_type())",
    "f(x)[0].cuda( )": "f(x)[0].to( accelerator_type())",
    "x.cuda ()": "x.to (accelerator_type())",
    "x.cuda().cuda()": "x.to(accelerator_type()).to(accelerator_type())",
    "x.cuda(non_blocking=True)": "x.to(accelerator_type(), non_blocking=True)",
    "x.cuda(\n    non_blocking=True,\n)": "x.to(\n    accelerator_type(), non_blocking=True,\n)",
    "x.cuda(**options)": "x.to(accelerator_type(), **options)",
    "x.cuda(device)": "x.to(device)",
    "x.cuda(device=d)": "x.to(device=d)",
    "x.cuda(torch.cuda.current_device())": "x.to(accelerator.current_device())",
    "x.cuda(d, non_blocking=True)": "x.to(d, non_blocking=True)",
    # "cuda" as an argument
    "torch.zeros(1, device='cuda')": "torch.zeros(1, device=accelerator_type())",
    'torch.load(p, map_location="cuda")': "torch.load(p, map_location=accelerator_type())",
    "x.to('cuda')": "x.to(accelerator_type())",
    "x.to('cuda', non_blocking=True)": "x.to(accelerator_type(), non_blocking=True)",
    "torch.autocast('cuda', enabled=False)": "torch.autocast(accelerator_type(), enabled=False)",
    # torch.device
    "torch.device('cuda')": "accelerator_device('cuda')",
    "torch.device('cuda:0')": "accelerator_device('cuda:0')",
    "torch.device('cuda', i)": "accelerator_device('cuda', i)",
    "torch.device(f'cuda:{i}')": "accelerator_device(f'cuda:{i}')",
    "torch.device(f'cuda:{torch.cuda.current_device()}')": (
        "accelerator_device(f'cuda:{accelerator.current_device()}')"
    ),
    # names of tensor types
    "t.type() == 'torch.cuda.FloatTensor'": (
        "t.type() == accelerator_tensor_type('torch.cuda.FloatTensor')"
    ),
    "'torch.cuda.HalfTensor' != t.type()": (
        "accelerator_tensor_type('torch.cuda.HalfTensor') != t.type()"
    ),
    "t in ['torch.cuda.CharTensor', y]": (
        "t in [accelerator_tensor_type('torch.cuda.CharTensor'), y]"
    ),
    "t in ('torch.cuda.HalfTensor',)": "t in (accelerator_tensor_type('torch.cuda.HalfTensor'),)",
}

STAYS = [
    "import torch.cuda",
    "import torch.cuda.nccl as nccl",
    "from torch.cuda import nvtx",
    "from torch.cuda.amp import autocast",
    "device.type == 'cuda'",
    "device.type in ('cuda', 'cpu')",
    "mesh(device_type='cuda')",
    "torch.device('cpu')",
    "torch.device(kind)",
    "x.to(device)",
    "x.cuda",
    "torch.cudart()",
    "my.torch.cuda.x",
    "'torch.cuda.synchronize()'",
    "print('torch.cuda.FloatTensor')",
    "# torch.cuda.synchronize()",
    "f'torch.cuda has {n}'",
    "def f():\n    'Calls torch.cuda and x.cuda().'",
]


@pytest.mark.parametrize(("before", "after"), FORMS.items())
def test_a_form_is_rewritten_and_what_it_needs_is_imported(before, after):
    names = {n.id for n in ast.walk(ast.parse(after)) if isinstance(n, ast.Name)}
    needed = ", ".join(sorted(n for n in names if n.startswith("accelerator")))
    imports = f"from mqo.megatron.device import {needed}\n" if needed else ""
    assert codemod("portable_device", f"{before}\n") == f"{imports}{after}\n"


@pytest.mark.parametrize("before", FORMS)
def test_a_second_codemod_changes_nothing(before):
    once = codemod("portable_device", before + "\n")
    assert codemod("portable_device", once) == once


@pytest.mark.parametrize("source", STAYS)
def test_what_is_no_use_of_the_device_stays(source):
    assert codemod("portable_device", source + "\n") == source + "\n"


def test_the_import_stands_behind_docstring_and_future_imports():
    head = '"""About torch.cuda."""\nfrom __future__ import annotations\n'
    new = codemod("portable_device", f"{head}\nimport torch\n\ntorch.cuda.init()\n")
    assert new == (
        f"{head}from mqo.megatron.device import accelerator\n\nimport torch\n\naccelerator.init()\n"
    )


def test_line_ends_of_windows_stay():
    new = codemod("portable_device", b"import torch\r\ntorch.cuda.init()\r\n")
    assert new.count("\r\n") == new.count("\n") == 3


@pytest.mark.parametrize(
    "source",
    [
        "f'{x.cuda()}'",
        "f'{x.to(\"cuda\")}'",
        "f'{g(device=\"cuda\")}'",
        "f'{t == \"torch.cuda.FloatTensor\"}'",
    ],
)
def test_a_form_that_the_rule_leaves_is_an_error_that_names_the_place(source):
    with pytest.raises(DriftError, match=r"leaves 1 \w+: megatron/core/x\.py:2 "):
        codemod("portable_device", f"import torch\n{source}\n")


def test_an_f_string_that_speaks_of_the_device_and_uses_it_is_refused():
    with pytest.raises(DriftError) as error:
        codemod("portable_device", "f'torch.cuda: {torch.cuda.name}'\n")
    assert error.value.found.endswith(" 2 times as text and 1 times as code")
    assert error.value.help == "Add this form to the rule in patches/portable_device.py"


def test_only_upstreams_packages_are_swept():
    rule = SERIES["portable_device"].load_codemod()
    assert rule.concerns("megatron/training/x.py", b"torch.cuda")
    assert not rule.concerns("mqo/megatron/device.py", b"torch.cuda")
    assert not rule.concerns("pretrain_gpt.py", b"torch.cuda")


OTHERS = [f"python3.{minor}" for minor in (11, 12, 13)]
PROGRAM = """
import importlib.util, json, sys
from mqo.overlay.codemod import apply_codemod
spec = importlib.util.spec_from_file_location("patch", sys.argv[1])
patch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(patch)
rewritten = lambda text: apply_codemod("core/x.py", text.encode(), patch.CODEMOD, "x").decode()
print(json.dumps([rewritten(text) for text in json.load(sys.stdin)]))
"""


@pytest.mark.parametrize("python", OTHERS)
def test_every_python_gives_the_same_source(python, monkeypatch):
    if python == f"python{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("this is the Python that runs the tests")
    program = shutil.which(python)
    works = program and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0
    if not works:
        pytest.skip(f"{python} is not installed")
    project = Project.here()
    monkeypatch.setenv("PYTHONPATH", str(project.root / "tools"))
    sources = [f"{form}\n" for form in (*FORMS, *STAYS)]
    command = [program, "-c", PROGRAM, str(project.patches / "portable_device.py")]
    done = subprocess.run(
        command, input=json.dumps(sources), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [codemod("portable_device", source) for source in sources]


# -- the real source ---------------------------------------------------------------------------


def test_the_codemod_changes_nothing_in_the_patched_tree(vendored):
    rule = SERIES["portable_device"].load_codemod()
    touched = vendored.manifest().touched_by("portable_device")
    assert len(touched) > 50
    for path in touched:
        content = vendored.read(path)
        assert apply_codemod(path, content, rule, "again") == content


def test_no_other_file_of_the_tree_needs_the_codemod(vendored):
    rule = SERIES["portable_device"].load_codemod()
    touched = set(vendored.manifest().touched_by("portable_device"))
    for path in vendored.upstream().files:
        if path.endswith(".py") and path not in touched:
            content = vendored.read(path)
            if rule.concerns(path, content):
                assert apply_codemod(path, content, rule, "again") == content
