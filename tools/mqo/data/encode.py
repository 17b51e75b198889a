"""Texts to token ids: tiktoken where the vocabulary allows it, Hugging Face's tokenizers else.

tiktoken encodes some ten times faster. It takes byte-level BPE whose ids follow the order of the
merges, split by a pattern that is known here: GPT-2's, Llama 3's, and what `mqo` trains. `agreed`
also compares the two on the corpus.
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    import numpy as np
    from tokenizers import Tokenizer

ENGINES = ("auto", "tiktoken", "tokenizers")
_END = "<|endoftext|>"

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

# An encoding holds a string and more a token: few of them at a time stay in the processor's cache,
# which saves a fifth of the time.
_BATCH = 16
_TRIED = 100_000  # characters on which the two engines are compared


@dataclass(frozen=True)
class Encoder:
    """Encodes texts, markers within a text as plain text.

    `encode` gives an array of ids (uint32) a text. `eod` ends a document, None if the
    tokenizer names no such token. `digest` tells tokenizers apart. `slow` is the same vocabulary in
    the library that defines it.
    """

    engine: str
    encode: Callable[[list[str]], list[np.ndarray]]
    vocab_size: int
    eod: int | None
    digest: str
    slow: Encoder | None = None


def load(path: Path, engine: str = "auto") -> Encoder:
    """Return the tokenizer at `path`, by what is there.

    A folder as transformers saves one, its tokenizer.json, a folder with GPT-2's vocab.json and
    merges.txt, or a file of ranks (GPT-2, cl100k, Llama 3's tokenizer.model, o200k). Raises
    DataError for anything else, and where `engine` (one of ENGINES) cannot take the vocabulary.
    """
    if path.name == "tokenizer.json":
        path = path.parent
    if (path / "tokenizer.json").is_file():
        return huggingface(path, engine)
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return gpt2(path / "vocab.json", path / "merges.txt", engine)
    if path.is_file():
        return _chosen(ranks(path), engine, path)
    raise DataError(
        f"There is no tokenizer at {path}",
        expected="a folder with tokenizer.json or with vocab.json and merges.txt, or a file of "
        "ranks (tokenizer.model, .tiktoken)",
    )


def agreed(encoder: Encoder, texts: list[str]) -> Encoder:
    """Return `encoder`, or its vocabulary's slow one if the two differ on the first of `texts`."""
    if encoder.slow is None:
        return encoder
    tried, left = [], _TRIED
    for text in texts:
        tried.append(text[:left])
        left -= len(tried[-1])
        if left <= 0:
            break
    both = zip(encoder.encode(tried), encoder.slow.encode(tried), strict=True)
    return encoder if all(a.tolist() == b.tolist() for a, b in both) else encoder.slow


# -- Hugging Face ---------------------------------------------------------------------------------


def huggingface(folder: Path, engine: str) -> Encoder:
    """Return the tokenizer of a folder with tokenizer.json and tokenizer_config.json."""
    # tokenizers alone reads these files; transformers would add seconds to every start.
    from tokenizers import Tokenizer

    try:
        check_tokenizer(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = read_json_object(folder / "tokenizer_config.json")
        eos = config.get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
        eod = None if eos is None else tokenizer.token_to_id(eos)
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(
            f"{folder} holds no readable tokenizer.json with tokenizer_config.json ({error})",
            expected="a folder as transformers saves a fast tokenizer",
        ) from error
    return _chosen(_of(tokenizer, eod), engine, folder)


def gpt2(vocabulary: Path, merges: Path, engine: str = "auto") -> Encoder:
    """Return the tokenizer of GPT-2's two files; <|endoftext|> ends a document."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    with reading(DataError):
        check_file(vocabulary, Limit.TOKENIZER)
        check_file(merges, Limit.TOKENIZER)
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(
            f"{vocabulary} and {merges} are no vocabulary and its merges ({error})",
            expected="GPT-2's vocab.json and merges.txt",
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    eod = tokenizer.token_to_id(_END)
    if eod is not None:
        tokenizer.add_special_tokens([_END])
    return _chosen(_of(tokenizer, eod), engine, vocabulary)


def _of(tokenizer: Tokenizer, eod: int | None) -> Encoder:
    # A document that spells out a marker is text about markers, and must not end there.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    description = tokenizer.to_str()
    digest = hashlib.sha256(description.encode()).hexdigest()

    def encode(texts: list[str]) -> list[np.ndarray]:
        parts = (texts[n : n + _BATCH] for n in range(0, len(texts), _BATCH))
        try:
            return [_array(one.ids) for part in parts for one in tokenizer.encode_batch_fast(part)]
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(
                f"The tokenizer cannot encode the text: {error}", expected="one that is whole"
            ) from error

    size = tokenizer.get_vocab_size()
    slow = Encoder("tokenizers", encode, size, eod, digest)
    table = json.loads(description)
    found = _as_ranks(table)
    if found is None:
        return slow
    fast = _tiktoken(*found, *_around(tokenizer))
    return Encoder("tiktoken", fast, size, eod, digest, slow)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and behind each text, Llama 3's BOS say."""
    whole = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]


def _as_ranks(table: dict[str, Any]) -> tuple[dict[bytes, int], str] | None:
    """Return ranks and pattern by which tiktoken is a tokenizer.json's tokenizer, if it can be."""
    model, added = table["model"], table["added_tokens"]
    pattern = _pattern(table["pre_tokenizer"])
    unlike = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(name) for name in unlike):
        return None
    if table["normalizer"] or pattern is None or not all(token["special"] for token in added):
        return None
    special = {token["content"] for token in added}
    vocabulary = {t: i for t, i in model["vocab"].items() if t not in special}
    # No letter is a space, which stands between two parts that are one text.
    merged = [m.replace(" ", "") if isinstance(m, str) else "".join(m) for m in model["merges"]]
    # tiktoken merges what gives the lowest id first, a tokenizer.json what it lists first.
    ids = [vocabulary.get(token, -1) for token in merged]
    letters = _letters()
    if any(a > b for a, b in pairwise([0, *ids])) or vocabulary.keys() != {*letters, *merged}:
        return None
    bytes_of = str.maketrans({letter: chr(byte) for letter, byte in letters.items()})
    spelt = (token.translate(bytes_of).encode("latin-1") for token in vocabulary)
    return dict(zip(spelt, vocabulary.values(), strict=True)), pattern


def _letters() -> dict[str, int]:
    """Return byte-level BPE's letters for bytes: printable ones as they are, others from U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


def _pattern(splitter: dict[str, Any] | None) -> str | None:
    """Return the pattern that splits text as `splitter` does, if it is a known one."""
    match splitter:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern if pattern in (_LLAMA3, _O200K) else None
    return None


# -- tiktoken -------------------------------------------------------------------------------------


def ranks(path: Path) -> Encoder:
    """Return the tokenizer of a file of ranks: a line has bytes in base64 and an id."""
    with reading(DataError):
        content = read_bytes(path, Limit.TOKENIZER)
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        table = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise DataError(
            f"{path} is no file of ranks ({error})",
            expected="lines of a token in base64 and its id, as Llama 3's tokenizer.model has them",
        ) from error
    if sorted(table.values()) != list(range(len(pairs))):
        raise DataError(
            f"{path} does not count its {len(pairs):,} tokens from 0 on", expected="a rank for each"
        )
    if len(table) not in _RANK_FILES:
        raise DataError(
            f"{path} holds {len(table):,} ranks",
            expected=", ".join(f"{n:,}" for n in _RANK_FILES) + " (GPT-2, cl100k, Llama 3, o200k)",
            help="Give a tokenizer.json, which says how text is split",
        )
    pattern, eod, size = _RANK_FILES[len(table)]
    digest = hashlib.sha256(content).hexdigest()
    return Encoder("tiktoken", _tiktoken(table, pattern), size, eod, digest)


def tekken(
    path: Path, pattern: str = "v2", special: int = TEKKEN_SPECIAL, size: int = TEKKEN_SIZE
) -> Encoder:
    """Return upstream's TikTokenizer of a JSON list of tokens; ids begin after `special` markers.

    `size` is the vocabulary's, markers included; </s> ends a document.
    """
    with reading(DataError):
        content = read_bytes(path, Limit.TOKENIZER)
    try:
        table = parse_json(path, content)
        tokens = [base64.b64decode(token["token_bytes"]) for token in table]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no vocabulary of TikTokenizer ({error!r})",
            expected="a JSON list of rank, token_bytes and token_str",
        ) from error
    table = {token: special + i for i, token in enumerate(tokens[: size - special])}
    options = f"{pattern} {special} {size}".encode()
    digest = hashlib.sha256(content + options).hexdigest()
    code = _tiktoken(table, TEKKEN_PATTERNS[pattern])
    return Encoder("tiktoken", code, size, _TEKKEN_END, digest)


def _tiktoken(
    table: dict[bytes, int],
    pattern: str,
    before: list[int] | None = None,
    after: list[int] | None = None,
) -> Callable[[list[str]], list[np.ndarray]]:
    import numpy as np
    import tiktoken

    if lacking := [byte for byte in range(256) if bytes([byte]) not in table]:
        raise DataError(
            f"The vocabulary has no token for {len(lacking)} bytes", expected="one for each of 256"
        )
    # No special tokens: a marker within a text is text.
    code = tiktoken.Encoding("mqo", pat_str=pattern, mergeable_ranks=table, special_tokens={})

    def encode(texts: list[str]) -> list[np.ndarray]:
        # encode_to_numpy is slower: it looks for special tokens, even where there are none.
        return [_array(code.encode_ordinary(text)) for text in texts]

    def encode_between(texts: list[str]) -> list[np.ndarray]:
        return [np.concatenate([first, ids, last]) for ids in encode(texts)]

    first, last = np.array(before or [], np.uint32), np.array(after or [], np.uint32)
    return encode_between if before or after else encode


def _array(ids: list[int]) -> np.ndarray:
    import numpy as np

    return np.frombuffer(array("I", ids), np.uint32)  # three times as fast as np.array


def _chosen(encoder: Encoder, engine: str, path: Path) -> Encoder:
    if engine == "auto" or encoder.engine == engine:
        # An engine that was asked for has no slow one to fall back to.
        return encoder if engine == "auto" else replace(encoder, slow=None)
    if engine == "tokenizers" and encoder.slow:
        return encoder.slow
    raise DataError(
        f"{engine} cannot take the vocabulary at {path}",
        expected="byte-level BPE with its ids in the order of its merges, split as GPT-2 or Llama 3"
        if engine == "tiktoken"
        else "a tokenizer.json, or GPT-2's vocab.json and merges.txt",
        help=f"Leave the engine to be chosen, or take {encoder.engine}",
    )
