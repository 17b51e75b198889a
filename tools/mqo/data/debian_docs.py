"""The dataset debian_docs: manuals and dictionaries in English from pinned Debian packages."""

import gzip
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from mqo import extras, process
from mqo.data import mix, packages
from mqo.data.distinct import PARAGRAPH, THRESHOLD, Distinct
from mqo.data.pair_check import lengths
from mqo.display import Say
from mqo.errors import SetupError
from mqo.untrusted import Limit, copy_file, parse_json, read_bytes, read_lines, read_toml, sha256_of

NAME = "debian_docs"
_TABLE = Path(__file__).with_name("debian_docs.toml")
_LIBRARIES = ("resiliparse", "datasketch")

_MOST = 10_000_000  # characters of a package
_LEAST = 500  # characters of a document
_ENDINGS = (".html", ".htm", ".pod", ".dz")
_CODE = {"_modules", "class-use", "src"}  # folders of pages that show source code, or only links
_NAVIGATION = [".navheader", ".navfooter"]
# Pages in other languages, indices and lists of symbols have fewer of these words.
_ENGLISH = re.compile(r"\b(?:the|and|of|to|that|is|with|for)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")
_SHARE = 0.1


@dataclass(frozen=True)
class Package:
    """A pinned package; `license` is that of most of its text."""

    name: str
    version: str
    sha256: str
    license: str


def digest() -> str:
    """Return the SHA-256 of the table of packages."""
    return sha256_of(_TABLE)


def table() -> list[Package]:
    """Return the packages, in the order in which they are read."""
    return [Package(**row) for row in read_toml(_TABLE)["packages"]]


def documents(cache: Path, licenses: Path, report: Say) -> list[mix.Document]:
    """Return the documents, in a fixed order, and copy the packages' licenses to a folder.

    Raises:
        SetupError: a library is missing, or apt-get does not get a package as pinned.
    """
    for library in _LIBRARIES:
        extras.require(library)
    licenses.mkdir()
    files = [(package, _fetch(cache, package, report)) for package in table()]
    distinct = Distinct()
    chosen: list[mix.Document] = []
    for package, file in files:
        with _as_pinned(package), process.temporary_folder("mqo-data-") as folder:
            share = packages.unpack(file, folder)
            notice = share / "doc" / package.name / "copyright"
            copy_file(notice, licenses / package.name, within=folder)
            texts = _english(package.name, share, distinct)
            chosen += mix.share(package.name, "apt", texts, report, _MOST)
    return sorted(chosen, key=mix.order)


def _fetch(cache: Path, package: Package, report: Say) -> Path:
    with _as_pinned(package):
        return packages.deb(cache, report, package.name, package.version, package.sha256)


@contextmanager
def _as_pinned(package: Package) -> Iterator[None]:
    try:
        yield
    except packages.UnavailableError as error:
        raise SetupError(
            f"The package {package.name}={package.version} cannot be used: apt failed ({error})",
            expected=f"Debian 12's package with SHA-256 {package.sha256}",
            help="On Debian 12, run `apt-get update` as root; elsewhere, copy the data made there",
        ) from error


def _english(name: str, share: Path, distinct: Distinct) -> Iterator[mix.Document]:
    for key, text in _texts(share):
        text = distinct.new_paragraphs(text).strip()
        if len(text) < _LEAST or not _is_english(text):
            continue
        if not distinct.is_near_duplicate(f"{name}/{key}", text):
            yield mix.Document(key, name, text)


def _is_english(text: str) -> bool:
    return len(_ENGLISH.findall(text)) >= _SHARE * len(_WORD.findall(text))


def _texts(share: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of the pages and of the entries of dictionaries in usr/share."""
    for path in sorted(share.rglob("*")):
        inside = path.relative_to(share)
        if path.suffix not in _ENDINGS or _CODE & set(inside.parts):
            continue
        if path.is_symlink() or path.is_dir():
            continue
        content = read_bytes(path, Limit.TEXT)
        if path.suffix == ".dz":
            for number, entry in mix.entries(_decoded(gzip.decompress(content))):
                yield f"{inside}:{number}", entry
        elif path.suffix == ".pod":
            yield str(inside), _decoded(content)
        else:
            yield str(inside), _main_content(_decoded(content))


def _decoded(content: bytes) -> str:
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    return bytes_to_str(content, detect_encoding(content))


def _main_content(html: str) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(html, main_content=True, alt_texts=False, skip_elements=_NAVIGATION)


# -- the card --------------------------------------------------------------------------------------


def write_card(card: Path, text: Path, prefix: Path) -> None:
    """Write which packages the dataset `text`, indexed as `prefix`, is made of, and its tokens."""
    listed = table()
    sizes: dict[str, list[tuple[int, int]]] = {package.name: [] for package in listed}
    for line, tokens in zip(read_lines(text), lengths(prefix), strict=True):
        document = parse_json(text, line)
        sizes[document["source"]].append((len(document["text"].encode()), tokens))
    every = [size for package in listed for size in sizes[package.name]]
    count, megabytes, whole = _totals(every)
    rows = [_row(package, sizes[package.name], whole) for package in listed]
    values = {"paragraph": PARAGRAPH, "similarity": THRESHOLD, "least": _LEAST, "most": _MOST}
    values |= {"packages": len(listed), "documents": count, "megabytes": megabytes, "tokens": whole}
    libraries = {name: f"{name} {version(name)}" for name in _LIBRARIES}
    content = _CARD.format(**libraries, **values, rows="\n".join(rows))
    card.write_text(content, encoding="utf-8")


def _totals(sizes: list[tuple[int, int]]) -> tuple[int, float, int]:
    """Return the number of documents, their megabytes and tokens from (bytes, tokens) of each."""
    return len(sizes), sum(size for size, _ in sizes) / 1e6, sum(tokens for _, tokens in sizes)


def _row(package: Package, sizes: list[tuple[int, int]], whole: int) -> str:
    count, megabytes, tokens = _totals(sizes)
    names = f"{package.name} | {package.version} | {package.license}"
    numbers = f"{count:,} | {megabytes:.2f} | {tokens:,} | {100 * tokens / whole:.1f} %"
    return f"| {names} | {numbers} | {package.sha256} |"


_CARD = """# debian_docs

Manuals and dictionaries in English from {packages} packages of Debian 12: {documents:,} documents,
{megabytes:.1f} MB of text, {tokens:,} tokens of the tokenizer in this folder. Made by
`mqo setup --dataset debian_docs`.

- HTML pages: the text of their main content, by {resiliparse}. POD files and dictionaries are as
  in the packages.
- Left out: paragraphs of {paragraph} characters or more that were there before; near-duplicates
  (MinHash of {datasketch}, similarity {similarity}); documents below {least} characters, and those
  that are not English prose.
- A package gives at most {most:,} characters.
- License: that of most of a package's text. The folder `licenses` has the notices of each package.

| package | version | license | documents | MB | tokens | share | SHA-256 of the package |
|---|---|---|---|---|---|---|---|
{rows}
"""
