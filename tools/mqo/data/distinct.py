"""Drop paragraphs that were seen before, and documents that are nearly equal to an earlier one."""

import hashlib
import re

from mqo import extras

PARAGRAPH = 80  # characters; shorter ones, such as headings, repeat rightly
_WORDS = 5  # per shingle
_HASHES = 128
THRESHOLD = 0.8  # Jaccard similarity of the sets of shingles


class Distinct:
    """The paragraphs and documents that were seen; results depend only on texts and their order."""

    def __init__(self) -> None:
        self._paragraphs: set[bytes] = set()
        self._library = extras.package("datasketch")
        self._index = self._library.MinHashLSH(threshold=THRESHOLD, num_perm=_HASHES)

    def new_paragraphs(self, text: str) -> str:
        """Return a text without the paragraphs that an earlier text, or this one, had before."""
        parts = re.split(r"\n\s*\n", text)
        return "\n\n".join(part for part in parts if len(part) < PARAGRAPH or self._is_new(part))

    def _is_new(self, paragraph: str) -> bool:
        key = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
        if key in self._paragraphs:
            return False
        self._paragraphs.add(key)
        return True

    def is_near_duplicate(self, name: str, text: str) -> bool:
        """Return whether an earlier document is nearly equal; if none is, remember this one."""
        words = re.findall(r"\w+", text.lower())
        shingles = {" ".join(words[n : n + _WORDS]) for n in range(max(1, len(words) - _WORDS + 1))}
        signature = self._library.MinHash(_HASHES)
        signature.update_batch([shingle.encode() for shingle in shingles])
        if self._index.query(signature):
            return True
        self._index.insert(name, signature)
        return False
