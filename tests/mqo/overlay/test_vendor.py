import dataclasses
import hashlib
import io
import zipfile

import pytest
from mqo import pip
from mqo.errors import EditedError, VendorError
from mqo.overlay import vendor as module
from mqo.overlay.apply import apply
from mqo.overlay.pin import Helper
from mqo.overlay.tree import Tree, sha256
from mqo.overlay.vendor import AlreadyVendored, Pin, Vendored, read_wheel, vendor
from mqo.project import Project

from ..conftest import FILES
from .conftest import WHEEL, wheel

HELPER = "megatron/core/datasets/helpers_cpp.so"
HELPER_SOURCE = "megatron/core/datasets/helpers.cpp"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty tree, its pin and its cache: no network, Python 3.11, and no helper to borrow."""
    monkeypatch.setattr(module, "running_python", lambda: "3.11")
    monkeypatch.setattr(module, "_is_helper", lambda path: path == HELPER)

    def refuse(*args, **kwargs):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(pip, "download", refuse)
    return Place(tmp_path / "place")


class Place:
    def __init__(self, root):
        self.root = root
        self.tree = Tree(root / "tree")
        self.pin = Pin(
            version="1.2.3",
            packages=("megatron/core", "megatron/training"),
            pythons=("3.11", "3.12"),
            helper=Helper("1.0.0", (), HELPER_SOURCE, sha256(b"// one\n")),
            wheels={},
        )
        self.said = []

    def add(self, name, content, *, pinned=True):
        """Put a wheel into the cache, and into the pin."""
        path = self.root / "cache/wheels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if pinned:
            wheels = {**self.pin.wheels, name: sha256(content)}
            self.pin = dataclasses.replace(self.pin, wheels=wheels)
        return path

    def vendor(self, **options):
        return vendor(self.tree, self.pin, self.root / "cache", report=self.said.append, **options)

    def files(self):
        folder = self.tree.root / "megatron"
        paths = [p for p in folder.rglob("*") if p.is_file()]
        return {p.relative_to(self.tree.root).as_posix(): p.read_bytes() for p in paths}


@pytest.fixture
def vendored_place(place):
    place.add(WHEEL, wheel(FILES))
    place.vendor()
    return place


# -- a good wheel ------------------------------------------------------------------------------


def test_the_pinned_wheels_packages_are_placed_and_recorded(place):
    place.add(WHEEL, wheel({**FILES, "megatron/other.py": b"", "elsewhere/x.py": b""}))
    assert place.vendor() == Vendored("1.2.3", f"wheel {WHEEL}", len(FILES))
    assert place.files() == FILES
    upstream = place.tree.upstream()
    assert upstream.files == {path: sha256(content) for path, content in FILES.items()}
    assert (upstream.version, upstream.python) == ("1.2.3", "3.11")


def test_our_own_files_in_the_tree_stay(place):
    own = place.tree.root / "mqo/quant/x.py"
    own.parent.mkdir(parents=True)
    own.write_text("ours\n")
    place.add(WHEEL, wheel(FILES))
    place.vendor()
    assert own.read_text() == "ours\n"


def test_what_is_in_place_is_left_alone(vendored_place):
    before = {p: p.stat().st_mtime_ns for p in vendored_place.tree.root.rglob("*") if p.is_file()}
    assert vendored_place.vendor() == AlreadyVendored("1.2.3", f"wheel {WHEEL}")
    untouched = {p for p in before if p.parent != vendored_place.tree.store}
    assert all(p.stat().st_mtime_ns == before[p] for p in untouched)


def test_a_patched_tree_of_the_pin_counts_as_in_place(vendored_place, mini):
    apply(vendored_place.tree, mini.series)
    assert isinstance(vendored_place.vendor(), AlreadyVendored)


def test_without_a_cached_wheel_pip_is_asked_for_it(place, monkeypatch):
    path = place.add(WHEEL, wheel(FILES))
    elsewhere = path.rename(place.root / WHEEL)
    asked = []

    def download(requirement, folder, *, python=None):
        asked.append((requirement, folder, python))
        return elsewhere

    monkeypatch.setattr(pip, "download", download)
    place.vendor()
    assert asked == [("megatron-core==1.2.3", place.root / "cache/wheels", "3.11")]
    assert place.files() == FILES


def test_another_version_replaces_the_tree_completely(vendored_place):
    files = {"megatron/core/package_info.py": b"MAJOR = 2\nMINOR = 0\nPATCH = 1\n"}
    source = vendored_place.add("megatron_core-2.0.1-cp311-cp311-any.whl", wheel(files))
    assert vendored_place.vendor(source=source).version == "2.0.1"
    assert vendored_place.files() == files


# -- wheels that are refused -------------------------------------------------------------------


def refused(place, match, **options):
    with pytest.raises(VendorError, match=match):
        place.vendor(**options)
    assert place.files() == {}
    assert not (place.tree.store / "upstream.json").exists()


def test_a_wheel_of_another_hash_is_refused(place):
    path = place.add(WHEEL, wheel(FILES))
    other = wheel({**FILES, "megatron/core/plain.py": b"evil = 1"})
    path.write_bytes(other)
    refused(place, rf"SHA-256 {sha256(other)}.*Expected: {place.pin.wheels[WHEEL]}", source=path)


def test_a_wheel_that_is_not_pinned_is_refused_naming_the_pinned_ones(place):
    place.add(WHEEL, wheel(FILES))
    path = place.add("megatron_core-9-cp311-any.whl", wheel(FILES), pinned=False)
    refused(place, rf"megatron_core-9.*is not among the wheels.*{WHEEL}", source=path)


def test_a_path_where_nothing_is_is_refused(place):
    refused(place, r"typo\.whl does not", source=place.root / "typo.whl")


def test_a_member_of_another_hash_than_records_is_refused(place):
    path = "megatron/core/plain.py"
    place.add(WHEEL, wheel(FILES, record={path: hashlib.sha256(b"else").digest()}))
    refused(place, rf"{path} has SHA-256 .* in the wheel's RECORD")


def test_a_member_that_record_does_not_list_is_refused(place):
    place.add(WHEEL, wheel(FILES, extra=[("megatron/core/more.py", b"x = 1\n")]))
    refused(place, r"more\.py has SHA-256 .*an entry in the wheel's RECORD")


def test_a_wheel_without_record_is_refused():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("megatron/core/x.py", "x = 1\n")
    with pytest.raises(VendorError, match=" 0 RECORD files"):
        read_wheel(content.getvalue(), ("megatron/core",), "x.whl")


def test_a_wheel_that_states_no_version_is_refused(place):
    files = {**FILES, "megatron/core/package_info.py": b"MAJOR = 1\n"}
    place.add(WHEEL, wheel(files))
    refused(place, "'MINOR'")


# -- checkouts ---------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for path, content in {
        **FILES,
        "tools/x.py": b"",
        "megatron/core/__pycache__/x.pyc": b"",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def test_a_checkouts_packages_are_placed(place, checkout):
    outcome = place.vendor(source=checkout)
    assert outcome == Vendored("1.2.3", f"checkout {checkout}", len(FILES))
    assert place.files() == FILES


def test_a_checkout_is_not_changed_by_patching_the_tree(place, checkout, mini):
    place.vendor(source=checkout)
    apply(place.tree, mini.series)
    layers = "megatron/core/layers.py"
    assert (checkout / layers).read_bytes() == FILES[layers]


def test_a_folder_that_is_no_checkout_is_refused(place, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(place, "holds no megatron/core or megatron/training", source=tmp_path / "empty")


def test_a_patched_tree_is_no_source(place, patched):
    refused(place, "mqo restore", source=patched.tree.root)


# -- trees that are not overwritten ------------------------------------------------------------


def kept(place, error, match, **options):
    before = place.files()
    with pytest.raises(error, match=match):
        place.vendor(**options)
    assert place.files() == before
    assert place.tree.upstream().version == "1.2.3"


def test_a_patched_tree_is_not_replaced(vendored_place, checkout, mini):
    apply(vendored_place.tree, mini.series)
    kept(vendored_place, VendorError, "is patched.*Run `mqo restore` first", source=checkout)


@pytest.mark.parametrize("from_checkout", [False, True])
def test_an_edited_tree_is_not_replaced(vendored_place, checkout, from_checkout):
    (vendored_place.tree.root / "megatron/core/plain.py").write_bytes(b"mine = 1")
    source = checkout if from_checkout else None
    kept(vendored_place, EditedError, r"changed by hand .*plain\.py", source=source)


def test_force_replaces_a_patched_and_edited_tree(vendored_place, mini):
    apply(vendored_place.tree, mini.series)
    (vendored_place.tree.root / "megatron/core/plain.py").write_bytes(b"mine = 1")
    vendored_place.vendor(force=True)
    assert vendored_place.files() == FILES
    assert vendored_place.tree.manifest() is None


def test_force_mends_a_damaged_record(vendored_place):
    (vendored_place.tree.store / "upstream.json").write_text("{")
    vendored_place.vendor(force=True)
    assert vendored_place.tree.upstream().version == "1.2.3"


# -- the borrowed helper -----------------------------------------------------------------------


@pytest.fixture
def lender(place):
    """The place with an older release that lends its compiled helper to Python 3.11."""
    helper = dataclasses.replace(place.pin.helper, pythons=("3.11",))
    place.pin = dataclasses.replace(place.pin, pythons=("3.12",), helper=helper)
    old = {"megatron/core/old.py": b"", HELPER: b"\x7fELF"}
    place.add("megatron_core-1.0.0-cp311-cp311-any.whl", wheel(old))
    return place


def test_the_helper_of_an_older_release_is_borrowed_when_its_source_is_the_same(lender):
    files = {**FILES, HELPER_SOURCE: b"// one\n"}
    lender.add(WHEEL.replace("cp311", "cp312"), wheel(files))
    lender.vendor()
    assert lender.files() == {**files, HELPER: b"\x7fELF"}
    assert HELPER in lender.tree.upstream().files


def test_no_helper_is_borrowed_for_another_source(lender):
    files = {**FILES, HELPER_SOURCE: b"// two\n"}
    lender.add(WHEEL.replace("cp311", "cp312"), wheel(files))
    lender.vendor()
    assert lender.files() == files
    assert "will be compiled" in lender.said[-1]


# -- the repository's own pin ------------------------------------------------------------------


def test_the_pin_names_a_wheel_for_every_python_and_the_helper():
    pin = Pin.load(Project.here().upstream_pin)
    assert all(len(digest) == 64 for digest in pin.wheels.values())
    needed = [(pin.version, p) for p in pin.pythons]
    needed += [(pin.helper.version, p) for p in pin.helper.pythons]
    for version, python in needed:
        tag = f"megatron_core-{version}-cp{python.replace('.', '')}-"
        for machine in ("x86_64", "aarch64"):
            names = [n for n in pin.wheels if n.startswith(tag) and n.endswith(f"{machine}.whl")]
            assert len(names) == 1, (tag, machine)
