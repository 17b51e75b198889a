"""Corpora, tokenizers and indices of somebody else: indexed and used, or refused in a paragraph."""

import base64
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from mqo.commands import train_config as launcher
from mqo.data import encode, preprocess
from mqo.data.encode import TEKKEN_SPECIAL
from mqo.launch import run as launch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..damage import attempt, stop
from ..launch.test_convert import write_tokenizer

LINES = [json.dumps({"text": f"w{n} w{n + 1}", "id": n}) for n in range(4)]


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "sound" / "corpus"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def prepared(tmp_path):
    """A function that names the command that indexes a corpus."""

    def command(kind, source, tokenizer, *rest):
        words = ("data", "prepare", kind, "--input", source, "--tokenizer", tokenizer)
        return (*words, "--workers", "1", "--output", tmp_path / "made", *rest)

    return command


@pytest.fixture
def lines(place, prepared):
    """JSON lines, and a tokenizer of transformers'."""
    words = write_tokenizer(place / "words", 250)
    (place / "a.jsonl").write_text("\n".join(LINES) + "\n")
    return place, [prepared("jsonl", place / "a.jsonl", words)]


@pytest.fixture
def packed(place, prepared):
    """Files of each way to pack lines, and a plain text."""
    words = write_tokenizer(place.with_name("words"), 250)
    content = "\n".join(LINES).encode()
    (place / "a.json.gz").write_bytes(gzip.compress(content))
    (place / "b.jsonl.zst").write_bytes(pyarrow.compress(content, "zstd", asbytes=True))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["w2", "w3"]}), place / "c.parquet")
    (place / "d.txt").write_text("w2 w3 w4")
    return place, [prepared("jsonl", place, words), prepared("text", place, words, "--strict")]


@pytest.fixture
def vocabularies(place, prepared, monkeypatch):
    """GPT-2's two files, a file of ranks and a list of TikTokenizer's, and what reads each."""
    corpus = place.with_name("a.jsonl")
    corpus.write_text("\n".join(LINES) + "\n")
    letters = {letter: n for n, letter in enumerate(bytes_to_unicode().values())}
    (place / "gpt2").mkdir()
    (place / "gpt2/vocab.json").write_text(json.dumps(letters | {"<|endoftext|>": 256, "ab": 257}))
    (place / "gpt2/merges.txt").write_text("#version: 0.2\na b\n")
    tokens = [base64.b64encode(bytes([n])).decode() for n in range(256)]
    (place / "ranks").write_text("".join(f"{token} {n}\n" for n, token in enumerate(tokens)))
    monkeypatch.setitem(encode._RANK_FILES, 256, (encode._GPT2, 256, 257))
    table = [{"rank": n, "token_bytes": token} for n, token in enumerate(tokens)]
    (place / "list.json").write_text(json.dumps(table))
    tekken = f"preprocess_data --input {corpus} --output-prefix {place.parents[1] / 'made2'} "
    tekken += f"--tokenizer-type TikTokenizer --tokenizer-model {place / 'list.json'} --append-eod "
    tekken += f"--vocab-size {TEKKEN_SPECIAL + 256}"
    return place, [
        prepared("jsonl", corpus, place / "gpt2"),
        prepared("jsonl", corpus, place / "ranks"),
        tuple(tekken.split()),
    ]


@pytest.fixture
def an_index(place, prepared, command_line, monkeypatch):
    """An index, its tokenizer, and the training and the plan that would read them."""
    words = write_tokenizer(place / "words", 250)
    (place.parent / "a.jsonl").write_text("\n".join(LINES) + "\n")
    files = ("--input", place.parent / "a.jsonl", "--output-prefix", place / "index")
    preprocess.run(preprocess.parse_args([*map(str, (*files, "--tokenizer-model", words))]))
    names = "--model llama32-1b --dataset dolma --quantization bf16 --training-config standard"
    paths = (place.parent / "out", place.parent / "events", words, place / "index_text_document")
    train = ("train_config", *names.split(), *paths)
    monkeypatch.setattr(launch, "ready_tree", stop)
    return place, [train, (*train, "--nproc-per-node", "1", "--dry-run")]


@pytest.fixture
def programs(command_line, index_here):
    """As `command_line`, and for the two programs that are no command of mqo's."""
    entries = {"preprocess_data": preprocess.main, "train_config": launcher.main}

    def run(name, *words):
        with pytest.MonkeyPatch.context() as patch:
            if name in entries:
                patch.setattr("mqo.cli.main", lambda: (entries[name](), exit(0)))
            return command_line(name, *words) if name not in entries else command_line(*words)

    return run


@pytest.mark.parametrize("seeds", [6, pytest.param(500, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kind", ["lines", "packed", "vocabularies", "an_index"])
def test_a_damaged_corpus_is_no_traceback(kind, seeds, request, programs):
    found = attempt(programs, *request.getfixturevalue(kind), range(seeds))
    assert len(found) > (seeds == 500)
