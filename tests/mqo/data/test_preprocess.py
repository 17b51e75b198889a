"""The indexing program takes upstream's flags, and does what the library does."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.data import preprocess, tokenizer
from mqo.project import Project

_PROGRAM = Project.here().tree / "tools" / "preprocess_data.py"
_TEXTS = ["The miller weighs the flour.", "", "The baker pays \u2014 in bread."]


@pytest.fixture
def words(tmp_path):
    folder = tmp_path / "words"
    tokenizer.train(iter(_TEXTS), folder, 270)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t, "body": t}) + "\n" for t in _TEXTS))
    return path


@pytest.fixture
def main(monkeypatch, capsys, text, tmp_path):
    """Runs the program on the corpus; its exit code, output, and errors."""

    def run(*flags):
        words = ["preprocess_data.py", "--input", text, "--output-prefix", tmp_path / "mine"]
        monkeypatch.setattr(sys, "argv", [str(w) for w in (*words, *flags)])
        code = 0
        try:
            preprocess.main()
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


def _names(folder: Path) -> set[str]:
    return {p.name for p in folder.glob("mine*")}


def test_it_runs_on_its_own_and_ends_with_the_counts(text, words, tmp_path):
    command = [sys.executable, _PROGRAM, "--input", text, "--output-prefix", tmp_path / "mine"]
    command += ["--tokenizer-model", words, "--append-eod", "--workers", "2"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (counts["documents"], counts["skipped"], counts["bad"]) == (2, 1, 0)
    size = (tmp_path / "mine_text_document.bin").stat().st_size
    assert size == 2 * counts["tokens"]
    assert _names(tmp_path) == {"mine_text_document.bin", "mine_text_document.idx"}


def test_upstreams_other_flags_are_taken(main, words, tmp_path):
    flags = ["--json-keys", "text", "body", "--tokenizer-type", "HuggingFaceTokenizer"]
    flags += ["--partitions", "2", "--keep-sequential-samples", "--log-interval", "1"]
    code, out, _ = main("--tokenizer-model", words, *flags)
    assert code == 0
    assert json.loads(out.splitlines()[-1])["documents"] == 4
    names = {f"mine_{key}_document.{end}" for key in ("text", "body") for end in ("bin", "idx")}
    assert _names(tmp_path) == names


def test_gpt2s_files_give_what_the_folder_gives(main, words, tmp_path):
    model = json.loads((words / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    pair = [tmp_path / f"mine_text_document.{end}" for end in ("bin", "idx")]
    assert main("--tokenizer-model", words, "--append-eod")[0] == 0
    expected = [path.read_bytes() for path in pair]
    files = ["--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt"]
    assert main("--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod")[0] == 0
    assert [path.read_bytes() for path in pair] == expected


def test_a_list_of_tokens_is_upstreams_tiktokenizer(main, tmp_path):
    rows = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    (tmp_path / "tokens.json").write_text(json.dumps(rows))
    flags = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", tmp_path / "tokens.json"]
    flags += ["--tiktoken-num-special-tokens", "10", "--vocab-size", "266", "--append-eod"]
    assert main(*flags)[0] == 0
    ids = memoryview((tmp_path / "mine_text_document.bin").read_bytes()).cast("H").tolist()
    first = [10 + byte for byte in _TEXTS[0].encode()]
    assert ids[: len(first) + 1] == [*first, 2]  # </s> is the third marker


def test_splitting_sentences_is_refused_with_the_reason(main, words):
    code, _, err = main("--tokenizer-model", words, "--split-sentences")
    assert code == 2
    assert "--split-sentences is only for BERT" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "HuggingFaceTokenizer needs --tokenizer-model"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "GPT2BPETokenizer needs --vocab-file"),
        (["--tokenizer-model", "nowhere"], " at nowhere. Expected: "),
    ],
)
def test_a_missing_file_is_one_paragraph(main, flags, words):
    code, _, err = main(*flags)
    assert code == 2
    assert err.startswith("preprocess_data: ")
    assert words in err


def test_a_bad_line_is_counted_or_with_strict_the_end(main, words, text):
    text.write_text(text.read_text() + "{\n")
    code, out, _ = main("--tokenizer-model", words)
    assert (code, json.loads(out.splitlines()[-1])["bad"]) == (0, 1)
    assert "a corpus.jsonl:4: no JSON object" in out
    code, _, err = main("--tokenizer-model", words, "--strict")
    assert code == 2
    assert "a corpus.jsonl:4: no JSON object" in err
