"""`mqo data prepare` from the command line."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from mqo.data import pair_check


@pytest.fixture
def prepare(words, tmp_path, command_line):
    """Runs the command: exit code, output, errors."""

    def run(kind, source, *flags):
        command = ["data", "prepare", kind, "--input", source, "--tokenizer", words]
        command += ["--workers", "2", "--output", tmp_path / "out" / "mine"]
        return command_line(*command, *flags)

    return run


def _wikipedia(folder, texts):
    columns = {"id": ["1"] * len(texts), "url": texts, "title": texts, "text": texts}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train-0-of-1.parquet")


def _dolma(folder, texts):
    lines = "".join(json.dumps({"id": "1", "text": t, "source": "web"}) + "\n" for t in texts)
    (folder / "web-0000.json.gz").write_bytes(gzip.compress(lines.encode()))


def _jsonl(folder, texts):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


def _text(folder, texts):
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)


@pytest.mark.usefixtures("index_here")
def test_every_kind_of_corpus_gives_the_same_bytes(prepare, tmp_path, prose):
    texts, seen = prose[:50], set()
    for write in (_wikipedia, _dolma, _jsonl, _text):
        kind = write.__name__[1:]
        (tmp_path / kind).mkdir()
        write(tmp_path / kind, texts)
        code, out, _ = prepare(kind, tmp_path / kind)
        prefix = tmp_path / "out" / "mine_text_document"
        assert code == 0
        assert out.startswith("50 documents, ")
        assert out.rstrip().endswith(str(prefix))
        pair_check.check_prefix(prefix)
        seen.add((prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()))
    assert len(seen) == 1


def test_the_counts_come_as_json_too(prepare, tmp_path, prose):
    _jsonl(tmp_path, prose[:9])
    code, out, _ = prepare("jsonl", tmp_path / "a.jsonl", "--json")
    found = json.loads(out)
    assert (code, found["documents"], found["bad"]) == (0, 9, 0)
    assert found["prefix"] == str(tmp_path / "out" / "mine_text_document")


def test_errors_are_one_paragraph(prepare, tmp_path, prose):
    _jsonl(tmp_path, prose[:2])
    code, out, err = prepare("jsonl", tmp_path / "a.jsonl", "--key", "body", "--strict")
    assert (code, out) == (2, "")
    assert "a.jsonl:1: " in err.splitlines()[-1] and "body" in err


def test_an_unknown_kind_lists_the_valid_ones(prepare, tmp_path):
    code, _, err = prepare("c4", tmp_path)
    assert code == 2
    assert err == (
        "mqo: There is no kind of corpus called 'c4'. "
        "Expected: one of dolma, jsonl, text, wikipedia.\n"
    )
