"""What the package may depend on."""

import ast
from pathlib import Path

from mqo.megatron import losses


def test_it_imports_torch_alone():
    modules = sorted(Path(losses.__file__).parent.glob("*.py"))
    assert len(modules) >= 4
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert [alias.name for alias in node.names] == ["torch"], path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                root = node.module.split(".")[0]
                own = node.module.startswith("mqo.megatron.losses")
                assert own or root in ("__future__", "collections", "torch", "typing"), path
