"""Put upstream into the tree, from the pinned wheel, another wheel, or a checkout.

Every byte is checked before the first file is placed: a wheel's SHA-256 against UPSTREAM.toml,
its members against the wheel's own RECORD.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sysconfig
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mqo import pip
from mqo.display import Say
from mqo.errors import OverlayError, UnknownNameError, VendorError
from mqo.overlay import records, transaction
from mqo.overlay.apply import refuse_edits
from mqo.overlay.pin import Pin
from mqo.overlay.records import Upstream
from mqo.overlay.tree import Tree, running_python, sha256, version_of
from mqo.untrusted import Limit, read_bytes, reading

Files = dict[str, bytes]
# What zipfile raises for members that are cut off, encrypted, or packed in a way it does not know.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, csv.Error)


@dataclass(frozen=True)
class Vendored:
    """`files` of upstream `version` were put into the tree."""

    version: str
    origin: str
    files: int


@dataclass(frozen=True)
class AlreadyVendored:
    """Nothing to do."""

    version: str
    origin: str


def vendor(
    tree: Tree,
    pin: Pin,
    cache: Path,
    *,
    version: str | None = None,
    source: Path | None = None,
    force: bool = False,
    report: Say = print,
) -> Vendored | AlreadyVendored:
    """Put upstream into the tree: the pin, or a release of UPSTREAM.toml, or a wheel or checkout.

    A tree that already holds the pinned release is not changed. A patched tree must be restored
    first, and a tree with edits is refused, unless `force`.
    """
    if tree.is_checkout:
        raise VendorError(
            f"{tree.root} is a git work tree of Megatron-LM",
            expected="a folder for mqo to fill",
            help="Run `mqo apply --tree`, which patches a work tree directly; its HEAD is "
            "the pristine source",
        )
    tree.root.mkdir(parents=True, exist_ok=True)
    with tree.locked("vendor"):
        release = version or pin.version
        if tree.is_vendored and not force:
            known = tree.upstream()
            wanted = source is None and known.version == release
            if wanted and known.python == running_python() and not tree.edited_files():
                return AlreadyVendored(known.version, known.origin)
            refuse_edits(tree)
            if tree.manifest():
                raise VendorError(
                    f"{tree.root} is patched",
                    expected="a pristine tree to replace",
                    help="Run `mqo restore` first",
                )
        if source is None and release != pin.version:
            source = wheel_of(pin, release, cache, report)
        files, found_version, origin = _collect(pin, cache, source, report)
        hashes = {path: sha256(data) for path, data in files.items()}
        _place(tree, pin, files, Upstream(found_version, origin, running_python(), hashes))
        return Vendored(found_version, origin, len(files))


def _collect(pin: Pin, cache: Path, source: Path | None, report: Say) -> tuple[Files, str, str]:
    """Return the files to place, their version, and where they come from."""
    if source is None:
        python = running_python() if running_python() in pin.pythons else pin.pythons[0]
        source = _fetch(pin, pin.version, python, cache, report)
    if source.is_dir():
        files, origin = _from_checkout(pin, source), f"checkout {source.resolve()}"
    else:
        files, origin = _from_wheel(pin, source), f"wheel {source.name}"
    version = version_of(files, origin)
    if not any(map(_is_helper, files)) and running_python() in pin.helper.pythons:
        files |= _borrowed_helper(pin, files, cache, report)
    return files, version, origin


def release(pin: Pin, version: str, cache: Path, report: Say) -> Files:
    """Return {path: content} of a release's trusted wheel, fetched if need be."""
    return _from_wheel(pin, wheel_of(pin, version, cache, report))


def wheel_of(pin: Pin, version: str, cache: Path, report: Say) -> Path:
    """Return a trusted wheel of a release: the one for the running Python, else for another.

    The sources are the same in all of them. UnknownNameError for a release without a wheel.
    """
    tags = [name.split("-")[2] for name in pin.digests if name.split("-")[1] == version]
    if not tags:
        raise UnknownNameError("megatron-core release in UPSTREAM.toml", version, pin.releases)
    running = f"cp{running_python().replace('.', '')}"
    tag = running if running in tags else tags[0]
    return _fetch(pin, version, f"{tag[2]}.{tag[3:]}", cache, report)


def _fetch(pin: Pin, version: str, python: str, cache: Path, report: Say, why: str = "") -> Path:
    """Return the wheel of a release for a Python, from the cache or through pip."""
    folder = cache / "wheels"
    tag = f"megatron_core-{version}-cp{python.replace('.', '')}-"
    for name, digest in pin.digests.items():
        cached = folder / name
        if (
            name.startswith(tag)
            and cached.exists()
            and sha256(read_bytes(cached, Limit.TEXT)) == digest
        ):
            return cached
    report(f"downloading megatron-core {version} for Python {python}{why}")
    return pip.download(f"megatron-core=={version}", folder, python=python)


def _from_wheel(pin: Pin, wheel: Path) -> Files:
    """Return the wheel's files below the pinned packages, checked twice."""
    if not wheel.exists():
        raise VendorError(f"{wheel} does not exist", expected="a megatron-core wheel or checkout")
    digest = pin.digests.get(wheel.name)
    if digest is None:
        raise VendorError(
            f"{wheel.name} is not among the wheels that UPSTREAM.toml pins",
            expected=f"one of {', '.join(sorted(pin.digests))}",
            help="Add its name and SHA-256 there if you trust it",
        )
    with reading(VendorError):
        content = read_bytes(wheel, Limit.TEXT)
    if sha256(content) != digest:
        raise VendorError(
            f"{wheel} has SHA-256 {sha256(content)}",
            expected=f"{digest}, as UPSTREAM.toml pins it",
            help="Delete the file and run `mqo vendor` again; if it still differs, do not use it",
        )
    return read_wheel(content, pin.packages, wheel.name)


def read_wheel(content: bytes, packages: tuple[str, ...], name: str) -> Files:
    """Return {path: bytes} of a wheel's members below `packages`, each checked against RECORD.

    Raises VendorError for a file that is not a wheel, for members with absolute paths, "..", or
    links, and for members that RECORD lacks or lists with another hash.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            for info in members:
                _refuse_unsafe(info, name)
            record = _read_record(archive, members, name)
            wanted = [i for i in members if i.filename.startswith(tuple(f"{p}/" for p in packages))]
            files = {info.filename: archive.read(info) for info in wanted}
    except _UNREADABLE as error:
        raise VendorError(f"{name} is damaged ({error})", expected="a wheel") from error
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if record.get(path) != f"sha256={digest}":
            raise VendorError(
                f"{name}: {path} has SHA-256 {digest}",
                expected=f"{record.get(path) or 'an entry'} in the wheel's RECORD",
                help="Delete the wheel from .cache/wheels and run `mqo vendor` again",
            )
    return files


def _read_record(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str) -> dict:
    records = [i for i in members if i.filename.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise VendorError(f"{name} holds {len(records)} RECORD files", expected="one, as wheels do")
    rows = csv.reader(archive.read(records[0]).decode("utf-8").splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}


def _refuse_unsafe(info: zipfile.ZipInfo, name: str) -> None:
    path = PurePosixPath(info.filename)
    is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
    if path.is_absolute() or ".." in path.parts or "\\" in info.filename or is_link:
        raise VendorError(
            f"{name} holds the member '{info.filename}'" + (", a link" if is_link else ""),
            expected="plain files below the wheel's own folder",
            help="Do not use this file",
        )


def _from_checkout(pin: Pin, folder: Path) -> Files:
    if Tree(folder).manifest():
        raise VendorError(
            f"{folder} is patched",
            expected="upstream's own source",
            help=f"Run `mqo restore --tree {folder}` first",
        )
    files: Files = {}
    for package in pin.packages:
        root = folder / package
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
                with reading(VendorError):
                    files[path.relative_to(folder).as_posix()] = read_bytes(path, any_name=True)
    if not files:
        raise VendorError(
            f"{folder} holds no {' or '.join(pin.packages)}",
            expected="the root of a Megatron-LM checkout, or a megatron-core wheel",
        )
    return files


def _borrowed_helper(pin: Pin, files: Files, cache: Path, report: Say) -> Files:
    """Return the compiled dataset helper of an older release, if its C++ source is the same."""
    if sha256(files.get(pin.helper.source, b"")) != pin.helper.source_sha256:
        report(f"{pin.helper.source} differs: the helper will be compiled at the first run")
        return {}
    why = ", only for its compiled dataset helper"
    wheel = _fetch(pin, pin.helper.version, running_python(), cache, report, why)
    return {path: data for path, data in _from_wheel(pin, wheel).items() if _is_helper(path)}


def _is_helper(path: str) -> bool:
    return path.endswith(f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")


def _place(tree: Tree, pin: Pin, files: Files, upstream: Upstream) -> None:
    """Make the tree's packages hold exactly these files, and store their pristine contents."""
    old = {
        path.relative_to(tree.root).as_posix()
        for package in pin.packages
        for path in (tree.root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    placed, edited = _known(tree)
    gone = sorted((old | set(placed)) - files.keys())
    changes = [transaction.Change(path, None) for path in gone]
    changes += [transaction.Change(p, d) for p, d in files.items() if tree.read(p) != d]
    written = {
        **tree.copies_of(edited),
        **tree.new_objects(files.values()),
        **tree.unused_objects(set(upstream.files.values())),
        records.UPSTREAM: records.as_json(upstream),
        records.MANIFEST: None,
        records.LITERALS: None,
    }
    transaction.commit(tree.root, changes, written, command="vendor")


def _known(tree: Tree) -> tuple[list[str], list[str]]:
    """Return the files that `apply` added here, and files changed by hand, as far as known."""
    try:
        manifest = tree.manifest()
        edited = tree.edited_files() if tree.is_vendored else []
    except OverlayError:
        return [], []  # --force also replaces a tree whose records are damaged
    return [p for p, f in manifest.files.items() if f.pristine is None] if manifest else [], edited
