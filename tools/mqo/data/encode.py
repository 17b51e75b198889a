"""Read tokenizers of several file formats; Hugging Face's `tokenizers` encodes for all of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mqo.errors import DataError
from mqo.untrusted import (
    Limit,
    check_file,
    check_tokenizer,
    parse_json,
    read_bytes,
    read_json_object,
    reading,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END = "<|endoftext|>"
_BATCH = 256  # encodings hold a string and more per token: this bounds the memory

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLITIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = _WORDS % (_CLITIC, _CLITIC, "{1,3}")

# A file of ranks does not say how text is split nor what ends a document; their number does.
# Number of ranks -> (pattern, id of the end of a document, size of the vocabulary).
_RANK_FILES = {
    50_256: (_GPT2, 50_256, 50_257),  # GPT-2
    100_256: (_LLAMA3, 100_257, 100_277),  # cl100k
    128_000: (_LLAMA3, 128_001, 128_256),  # Llama 3
    199_998: (_O200K, 199_999, 200_019),  # o200k
}

# Upstream's TikTokenizer: its two patterns, and where it puts </s>.
TEKKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _WORDS % ("", "", ""),
}
_TEKKEN_END, TEKKEN_SPECIAL, TEKKEN_SIZE = 2, 1000, 1 << 17


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, its vocabulary size, and the id that ends a document (None if it has none)."""

    tokenizer: Tokenizer
    vocab_size: int
    eod: int | None

    def __post_init__(self) -> None:
        # A document that spells out a marker is text about markers, and must not end there.
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; DataError if the tokenizer cannot encode it."""
        parts = (texts[n : n + _BATCH] for n in range(0, len(texts), _BATCH))
        try:
            return [row.ids for part in parts for row in self.tokenizer.encode_batch_fast(part)]
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(
                f"The tokenizer cannot encode the text: {error}", expected="a complete tokenizer"
            ) from error


def load(path: Path) -> Encoder:
    """Return the tokenizer at `path`.

    `path` is a folder that transformers saved, its tokenizer.json, a folder with GPT-2's vocab.json
    and merges.txt, or a file of ranks (GPT-2, cl100k, Llama 3's tokenizer.model, o200k). Raises
    DataError for anything else.
    """
    if path.name == "tokenizer.json":
        path = path.parent
    if (path / "tokenizer.json").is_file():
        return _huggingface(path)
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return gpt2(path / "vocab.json", path / "merges.txt")
    if path.is_file():
        return _ranks(path)
    raise DataError(
        f"No tokenizer was found at {path}",
        expected="a folder with tokenizer.json or with vocab.json and merges.txt, or a file of "
        "ranks (tokenizer.model, .tiktoken)",
    )


def _huggingface(folder: Path) -> Encoder:
    """Return the tokenizer of a folder with tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer

    try:
        check_tokenizer(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        eos = read_json_object(folder / "tokenizer_config.json").get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
        eod = None if eos is None else tokenizer.token_to_id(eos)
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(
            f"{folder} holds no readable tokenizer.json with tokenizer_config.json ({error})",
            expected="a folder as transformers saves a fast tokenizer",
        ) from error
    return Encoder(tokenizer, tokenizer.get_vocab_size(), eod)


def gpt2(vocabulary: Path, merges: Path) -> Encoder:
    """Return the tokenizer of GPT-2's two files; <|endoftext|> ends a document."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    with reading(DataError):
        check_file(vocabulary, Limit.TOKENIZER)
        check_file(merges, Limit.TOKENIZER)
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(
            f"{vocabulary} and {merges} are not a vocabulary and its merges ({error})",
            expected="GPT-2's vocab.json and merges.txt",
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    eod = tokenizer.token_to_id(_END)
    if eod is not None:
        tokenizer.add_special_tokens([_END])
    return Encoder(tokenizer, tokenizer.get_vocab_size(), eod)


def _ranks(path: Path) -> Encoder:
    """Return the tokenizer of a file of ranks: each line has bytes in base64 and an id."""
    with reading(DataError):
        content = read_bytes(path, Limit.TOKENIZER)
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        table = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise DataError(
            f"{path} is not a file of ranks ({error})",
            expected="lines of a token in base64 and its id, as in Llama 3's tokenizer.model",
        ) from error
    if sorted(table.values()) != list(range(len(pairs))):
        raise DataError(
            f"{path} does not rank its {len(pairs):,} tokens from 0", expected="a rank for each"
        )
    if len(table) not in _RANK_FILES:
        raise DataError(
            f"{path} holds {len(table):,} ranks",
            expected=", ".join(f"{n:,}" for n in _RANK_FILES) + " (GPT-2, cl100k, Llama 3, o200k)",
            help="Give a tokenizer.json, which says how text is split",
        )
    pattern, eod, size = _RANK_FILES[len(table)]
    return Encoder(_converted(table, pattern), size, eod)


def tekken(
    path: Path, pattern: str = "v2", special: int = TEKKEN_SPECIAL, size: int = TEKKEN_SIZE
) -> Encoder:
    """Return upstream's TikTokenizer for a JSON list of tokens; ids begin after `special` markers.

    `size` is the vocabulary's, markers included; </s> ends a document.
    """
    with reading(DataError):
        content = read_bytes(path, Limit.TOKENIZER)
    try:
        table = parse_json(path, content)
        tokens = [base64.b64decode(token["token_bytes"]) for token in table]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a vocabulary of TikTokenizer ({error!r})",
            expected="a JSON list of rank, token_bytes and token_str",
        ) from error
    table = {token: special + i for i, token in enumerate(tokens[: size - special])}
    return Encoder(_converted(table, TEKKEN_PATTERNS[pattern]), size, _TEKKEN_END)


def _converted(table: dict[bytes, int], pattern: str) -> Tokenizer:
    """Return the tokenizer of tiktoken's form: {bytes: id}, and the pattern that splits text."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if lacking := [byte for byte in range(256) if bytes([byte]) not in table]:
        raise DataError(
            f"The vocabulary lacks tokens for {len(lacking)} bytes", expected="one for each of 256"
        )
    converter = TikTokenConverter(pattern=pattern)
    # Its own reader caches by path, even if the file changes.
    converter.load_tiktoken_bpe = lambda _: table
    return converter.converted()
