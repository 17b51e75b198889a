"""The dataset debian_docs from small packages of ours, which an apt-get of ours serves."""

import gzip
import json
import os
import shutil
import subprocess

import pytest
from mqo import extras
from mqo.data import debian_docs, packages, tokenizer
from mqo.data import prepare as prepare_module
from mqo.data.pipeline import Counts
from mqo.data.prepare import prepare
from mqo.errors import SetupError
from mqo.project import Project
from mqo.untrusted import sha256_of

pytest.importorskip("datasketch")
pytest.importorskip("resiliparse")
pytestmark = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs Debian's dpkg-deb")

APT = """#!/bin/sh
for package; do :; done
cp "{served}/${{package%=*}}_${{package#*=}}_all.deb" . 2> /dev/null && exit
echo "E: Version '${{package#*=}}' for '${{package%=*}}' was not found" >&2
exit 100
"""
ROW = '[[packages]]\nname = "{}"\nversion = "1-2"\nsha256 = "{}"\nlicense = "GPL-2"\n'


def prose(topic, count=12):
    """Paragraphs in English that differ from each other, and from those on other topics."""
    parts = (
        f"Part {n} of the {topic} is that the {topic} turns {n} times, and with it "
        + " ".join(f"the wheel of the {topic} number {n * 7 + k} that is" for k in range(8))
        for n in range(count)
    )
    return "".join(f"<p>{part}</p>\n" for part in parts)


def page(body):
    return f"<html><head><title>A page</title></head><body><main>{body}</main></body></html>"


BAKER, MILLER = prose("baker"), prose("miller")
# Equal to BAKER but for a word per paragraph, so that no paragraph is the same.
NEAR = BAKER.replace("turns", "spins")
MANUAL = {
    "doc/manual/copyright": "GPL-2 it is.",
    "doc/manual/html/a.html": page(BAKER),
    "doc/manual/html/b.html": page(NEAR),
    "doc/manual/html/c.html": page(MILLER + "<p>This page alone has an end.</p>"),
    "doc/manual/html/d.html": page("<p>Der Müller mahlt das Korn, der Bäcker backt.</p>" * 20),
    "doc/manual/html/e.html": page("<p>The end of the book.</p>"),
    "doc/manual/html/_modules/f.html": page(prose("source")),
    "doc/manual/picture.png": "no text",
}
POD = {
    "doc/pages/copyright": "GPL-2, too.",
    "perl/pod/a.pod": "=head1 The river\n\n" + "The flood of the river is with us. " * 20,
    "doc/pages/a.html": page(MILLER),
}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Builds packages, which apt-get then serves, and lists them in the dataset's table."""
    served, programs = tmp_path / "served", tmp_path / "programs"
    served.mkdir()
    programs.mkdir()
    client = programs / "apt-get"
    client.write_text(APT.format(served=served))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(debian_docs, "_TABLE", tmp_path / "table.toml")

    def build(contents):
        rows = ""
        for name, files in contents.items():
            tree, target = tmp_path / "trees" / name, served / f"{name}_1-2_all.deb"
            control = f"Package: {name}\nVersion: 1-2\nArchitecture: all\nMaintainer: us <u@s>\n"
            for path, text in {
                "DEBIAN/control": f"{control}Description: a test\n",
                **{f"usr/share/{path}": text for path, text in files.items()},
            }.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                content = text if isinstance(text, bytes) else text.encode()
                (tree / path).write_bytes(content)
            command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-b", tree, target]
            subprocess.run(command, check=True, capture_output=True)
            rows += ROW.format(name, sha256_of(target))
        debian_docs._TABLE.write_text(rows)
        return served

    return build


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout, where indexing only counts: every document has 7 tokens."""
    monkeypatch.setattr(tokenizer, "DEFAULT_VOCAB_SIZE", 300)
    monkeypatch.setattr(prepare_module, "build_index", _count)
    monkeypatch.setattr(debian_docs, "lengths", _sevens)
    return Project(tmp_path / "checkout")


def _count(kind, inputs, words, stem, **how):
    [text] = inputs
    count = len(text.read_text(encoding="utf-8").splitlines())
    for suffix in (".bin", ".idx"):
        stem.with_name(f"{stem.name}_text_document{suffix}").write_text(str(count))
    return Counts(documents=count, tokens=7 * count)


def _sevens(prefix):
    return [7] * int(prefix.with_name(f"{prefix.name}.idx").read_text())


def _made(project, report=print):
    folder, _ = prepare(project, "debian_docs", report=report)
    text = (folder / "text.jsonl").read_text(encoding="utf-8")
    documents = map(json.loads, text.splitlines())
    return folder, {f"{document['source']} {document['id']}": document for document in documents}


def test_english_prose_stays_and_what_repeats_goes(serve, project):
    serve({"manual": MANUAL, "pages": POD})
    folder, documents = _made(project)
    assert set(documents) == {
        "manual doc/manual/html/a.html",
        "manual doc/manual/html/c.html",
        "pages perl/pod/a.pod",
    }
    assert json.loads((folder / "prepared.json").read_text())["documents"] == 3
    text = documents["manual doc/manual/html/c.html"]["text"]
    assert "miller turns 3 times" in text and "<p>" not in text


def test_the_card_has_the_sources_and_the_folder_their_licenses(serve, project):
    served = serve({"manual": MANUAL, "pages": POD})
    folder, _ = _made(project)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "2 packages" in card and "3 documents" in card and "21 tokens" in card
    [row] = [line for line in card.splitlines() if line.startswith("| manual ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["manual", "1-2", "GPL-2", "2"]
    assert cells[5:] == ["14", "66.7 %", sha256_of(served / "manual_1-2_all.deb")]
    licenses = folder / "licenses"
    assert (licenses / "manual").read_text() == "GPL-2 it is."
    assert (licenses / "pages").read_text() == "GPL-2, too."


def test_two_builds_are_equal_and_the_second_downloads_nothing(serve, project, tmp_path):
    serve({"manual": MANUAL, "pages": POD})
    stamps, lines = [], []
    for _ in range(2):
        folder, _ = _made(project, lines.append)
        stamps.append((folder / "prepared.json").read_text())
        shutil.rmtree(folder)
    assert stamps[0] == stamps[1]
    assert sum("Downloading" in line for line in lines) == 2


def test_a_dictionary_gives_its_entries(serve, project, monkeypatch):
    monkeypatch.setattr(debian_docs, "_LEAST", 20)
    entries = "00-database-info\n\n   Of us.\n\nmill\n   The house of the miller.\n\nox\n   It ox."
    packed = gzip.compress(entries.encode())
    serve({"words": {"doc/words/copyright": "GPL-2", "dictd/words.dict.dz": packed}})
    _, documents = _made(project)
    assert [document["text"] for document in documents.values()] == [
        "mill\n   The house of the miller."
    ]


def test_a_package_gives_no_more_than_its_share(serve, project, monkeypatch):
    monkeypatch.setattr(debian_docs, "_MOST", 7_000)
    serve({"manual": MANUAL})
    assert len(_made(project)[1]) == 1


def test_another_package_than_the_pinned_one_is_refused(serve, project):
    served = serve({"manual": MANUAL, "pages": POD})
    with (served / "pages_1-2_all.deb").open("ab") as file:
        file.write(b"more")
    with pytest.raises(SetupError, match=r"pages=1-2.*SHA-256 [0-9a-f]{64}.*Expected.*apt-get"):
        _made(project)
    assert not (project.data / "debian_docs").exists()
    # The wrong file is not kept.
    serve({"manual": MANUAL, "pages": POD})
    assert len(_made(project)[1]) == 3


def test_a_version_that_is_not_served_is_named(serve, project):
    served = serve({"manual": MANUAL, "pages": POD})
    (served / "pages_1-2_all.deb").unlink()
    with pytest.raises(SetupError, match=r"pages=1-2.*Version '1-2' for 'pages' was not found"):
        _made(project)
    assert not (project.data / "debian_docs").exists()


def test_without_apt_the_error_says_so(serve, project, monkeypatch):
    serve({"manual": MANUAL})
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match="not installed"):
        _made(project)


def test_a_missing_library_is_named_before_any_download(serve, project, monkeypatch):
    serve({"manual": MANUAL})
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    lines = []
    with pytest.raises(SetupError, match="package resiliparse is missing"):
        _made(project, lines.append)
    assert not lines


class Killed(BaseException):
    """Like a kill: nothing in the code under test handles it."""


@pytest.mark.parametrize("step", ["_fetch", "_main_content", "write_card"])
def test_a_kill_leaves_no_dataset(serve, project, step):
    def die(*_, **__):
        raise Killed

    serve({"manual": MANUAL})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(debian_docs, step, die)
        _made(project)
    assert not (project.data / "debian_docs").exists()
    assert len(_made(project)[1]) == 2


def test_the_table_pins_each_package_once():
    listed = debian_docs.table()
    assert len({package.name for package in listed}) == len(listed) > 30
    assert all(len(package.sha256) == 64 and package.license for package in listed)
