import ast
import sys

import pytest
from mqo.errors import DriftError
from mqo.overlay.codemod import Source

from .conftest import SERIES, codemod

FORMS = {
    "from typing import override": "from typing_extensions import override",
    "from typing import Any, override": (
        "from typing import Any\nfrom typing_extensions import override"
    ),
    "from typing import (\n    Any,\n    override,\n    List as L,\n)": (
        "from typing import Any, List as L\nfrom typing_extensions import override"
    ),
    "from typing import override as o": "from typing_extensions import override as o",
    "if a:\n    from typing import Any, override": (
        "if a:\n    from typing import Any\n    from typing_extensions import override"
    ),
    "if a: from typing import Any, override": (
        "if a: from typing import Any; from typing_extensions import override"
    ),
    "import triton": "from mqo.megatron.device import triton",
    "import triton as t": "from mqo.megatron.device import triton as t",
    "import triton.language as tl": "from mqo.megatron.device import triton_language as tl",
    "import triton.language": "from mqo.megatron.device import triton",
    "import triton, triton.language as tl": (
        "from mqo.megatron.device import triton\n"
        "from mqo.megatron.device import triton_language as tl"
    ),
    "import os, triton": "import os\nfrom mqo.megatron.device import triton",
}

STAYS = [
    "from typing import Any, overload",
    "from typing_extensions import override",
    "import typing",
    "try:\n    import triton\nexcept ImportError:\n    triton = None",
    "if HAVE:\n    import triton.language as tl",
    "def f():\n    import triton",
    "from .triton import kernel",
    "from .ops.triton.x import kernel",
    "import tritonic",
    "override = True",
    "x = 'import triton'",
]


@pytest.mark.parametrize(("before", "after"), FORMS.items())
def test_an_import_is_moved(before, after):
    assert codemod("python_compat", before + "\n") == after + "\n"


@pytest.mark.parametrize("source", [*STAYS, *FORMS.values()])
def test_what_imports_anywhere_stays(source):
    assert codemod("python_compat", source + "\n") == source + "\n"


def test_line_ends_of_windows_stay():
    new = codemod("python_compat", b"from typing import Any, override\r\n")
    assert new == "from typing import Any\r\nfrom typing_extensions import override\r\n"


@pytest.mark.parametrize(
    "source",
    ["from triton import jit", "from triton.language import x", "import triton.tools as t"],
)
def test_an_import_of_triton_that_the_facade_does_not_bring_is_an_error(source):
    with pytest.raises(DriftError, match=r"leaves 1 \w+: .*x\.py:1 an unguarded import of triton"):
        codemod("python_compat", source + "\n")


def test_the_moved_names_import_here():
    for after in FORMS.values():
        if "typing" in after:
            exec(after, {"a": True})


def test_every_import_from_typing_in_the_tree_exists_in_this_python(vendored):
    rule = SERIES["python_compat"].load_codemod()
    for path in vendored.manifest().touched_by("python_compat"):
        for node in Source(vendored.read(path), rule.needle).walk():
            if isinstance(node, ast.ImportFrom) and node.module == "typing":
                names = {alias.name for alias in node.names}
                assert all(hasattr(sys.modules["typing"], name) for name in names), path
