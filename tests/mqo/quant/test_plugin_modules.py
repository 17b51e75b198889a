"""The modules that a file of quantizers imports, and its digest, unrun."""

import os
import shutil

import pytest
from mqo.quant.plugin_modules import digest_of, local_files

HEAD = "from mqo import quant\nfrom mqo.quant import quantizer\n"
BODY = "def mine(x, context):\n    return x\n"
MINE = f'@quantizer("mine")\n{BODY}'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"mine.py": "import os, torch, json", "other.py": ""}, []),
        ({"mine.py": "import helper", "helper.py": "", "other.py": ""}, ["helper.py"]),
        ({"mine.py": "import helper as h", "helper.py": ""}, ["helper.py"]),
        ({"mine.py": "from helper import *", "helper.py": ""}, ["helper.py"]),
        ({"mine.py": "def f():\n  import helper", "helper.py": ""}, ["helper.py"]),
        ({"mine.py": "import b", "b.py": "import c", "c.py": ""}, ["b.py", "c.py"]),
        ({"mine.py": "import b", "b.py": "import c", "c.py": "import b, mine"}, ["b.py", "c.py"]),
        ({"mine.py": "import mine"}, []),
        (
            {"mine.py": "import a.b", "a/__init__.py": "", "a/b.py": "", "a/c.py": ""},
            ["a/__init__.py", "a/b.py"],
        ),
        (
            {"mine.py": "from a import b", "a/__init__.py": "", "a/b.py": ""},
            ["a/__init__.py", "a/b.py"],
        ),
        ({"mine.py": "from a.b import c", "a/b/c.py": "", "a/b/__init__.py": ""}, ["a/b/*.py"]),
        ({"mine.py": "from a import b", "a/b.py": ""}, ["a/b.py"]),
        (
            {"mine.py": "import a", "a/__init__.py": "from .b import C", "a/b.py": "import c"}
            | {"c.py": "", "b.py": ""},
            ["a/__init__.py", "a/b.py", "c.py"],
        ),
        (
            {"mine.py": "import a.b", "a/b/__init__.py": "from .. import c", "a/c.py": ""}
            | {"c.py": "", "a/__init__.py": ""},
            ["a/*.py", "a/b/__init__.py"],
        ),
        (
            {"mine.py": "def f():\n  from . import b\n  from .. import c", "b.py": "", "c.py": ""},
            [],
        ),
        (
            {"mine.py": "try:\n  from .b import f\nexcept ImportError:\n  from b import f"}
            | {"b.py": ""},
            ["b.py"],
        ),
        ({"mine.py": "import mqo, torch.nn", "torch.py": "", "mqo/__init__.py": ""}, []),
    ],
)  # fmt: skip
def test_the_modules_of_the_folder_that_a_file_imports_are_its_own(write_file, files, expected):
    for name, text in files.items():
        path = write_file(text, name)
    folder = next(parent for parent in path.parents if parent.name == "a folder")
    local = local_files(folder / "mine.py")
    assert local[0] == folder / "mine.py" and len(local) == len({*local})
    assert {*local[1:]} == {path for pattern in expected for path in folder.glob(pattern)}


# The files of a package, of which 'a folder' is the base.
PACKAGE = {"own/__init__.py": "", "own/sub/__init__.py": "", "own/b.py": "", "b.py": ""}
PACKAGE |= {"own/sub/b.py": "", "own/sub/unused.py": ""}
BOTH = ["own/__init__.py", "own/sub/__init__.py"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"own/sub/mine.py": "import os"}, []),
        ({"own/sub/mine.py": "import b"}, ["own/sub/b.py"]),
        ({"own/sub/mine.py": "from .b import f"}, [*BOTH, "own/sub/b.py"]),
        ({"own/sub/mine.py": "from . import b"}, [*BOTH, "own/sub/b.py"]),
        ({"own/sub/mine.py": "from ..b import f"}, [*BOTH, "own/b.py"]),
        ({"own/sub/mine.py": "from own.b import f"}, [*BOTH, "own/b.py"]),
        ({"own/sub/mine.py": "import own.sub.b, b"}, [*BOTH, "own/sub/b.py"]),
        ({"own/sub/mine.py": "def f():\n  from . import b"}, [*BOTH, "own/sub/b.py"]),
        (
            {"own/sub/mine.py": "from . import b"}
            | {"own/__init__.py": "from own.b import f\nimport b"},
            [*BOTH, "own/sub/b.py", "own/b.py"],
        ),
        (
            {"own/sub/mine.py": "from . import b\ntry:\n  import own._c\nfinally: pass"},
            [*BOTH, "own/sub/b.py"],
        ),
    ],
)  # fmt: skip
def test_the_modules_of_a_package_that_a_file_imports_are_its_own(write_file, files, expected):
    """With the packages that are run first; a file that needs none of them is run by itself."""
    for name, text in (PACKAGE | files).items():
        folder = write_file(text, name).parents[name.count("/")]
    path = folder / "own/sub/mine.py"
    local = local_files(path)
    assert local[0] == path and len(local) == len({*local})
    assert {*local[1:]} == {folder / name for name in expected}


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"mine.py": "from .b import f", "b.py": ""}, r"\.b in line 1, and is in no package"),
        ({"mine.py": "import b", "b.py": "x = 1\nfrom . import c"}, r"b\.py imports \. in line 2"),
        ({"__init__.py": "", "mine.py": "from .. import b"}, r"\.\. in line 1"),
        ({"__init__.py": "", "mine.py": "from ._c import f", "_c.so": ""}, r"own\._c in line 1"),
        (
            {"__init__.py": "from own import b\nimport own.c", "mine.py": "import own"},
            r"own\.c in ",
        ),
    ],
)
def test_an_import_that_would_fail_in_a_copy_is_refused(write_file, files, name):
    for file, text in ({"b.py": ""} | files).items():
        path = write_file(text, f"own/{file}")
    with pytest.raises(ValueError, match=name):
        digest_of(path.with_name("mine.py"))


# -- digests ---------------------------------------------------------------------------------------


@pytest.fixture
def package(write_file):
    """A file that imports a helper and a module of a package."""
    write_file("import table\nFACTOR = 2\n", "helper.py")
    write_file("ROWS = 3\n", "table/__init__.py")
    return write_file(f"import helper\n{HEAD}{MINE}")


@pytest.mark.parametrize("name", ["mine.py", "helper.py", "table/__init__.py"])
def test_the_digest_changes_with_each_own_file(package, name):
    before = digest_of(package)
    path = package.parent / name
    text = path.read_text()
    path.write_text(f"{text}# a comment\n")
    assert digest_of(package) != before
    path.write_text(text)
    assert digest_of(package) == before


def test_the_digest_depends_on_nothing_else(package, tmp_path, write_file):
    before = digest_of(package)
    write_file("x = 1\n", "not_imported.py")
    write_file("x = 1\n", "__pycache__/helper.cpython-311.pyc")
    os.utime(package, (0, 0))
    assert digest_of(package) == before
    elsewhere = shutil.copytree(package.parent, tmp_path / "elsewhere")
    assert digest_of(elsewhere / "mine.py") == before


def test_the_digest_tells_which_file_has_which_content(package):
    before = digest_of(package)
    helper = package.parent / "helper.py"
    helper.rename(package.parent / "aid.py")
    package.write_text(package.read_text().replace("helper", "aid"))
    renamed = digest_of(package)
    package.write_text(package.read_text().replace("import aid", "import table"))
    assert len({before, renamed, digest_of(package)}) == 3
