"""Unified diffs of bytes, whatever their encoding. Standard library only."""

from __future__ import annotations

import difflib
from functools import lru_cache


@lru_cache(1024)  # the runs of a sweep differ in a few files
def unified(path: str, before: bytes | None, after: bytes | None) -> bytes:
    """Return a unified diff that `git apply` takes; empty if nothing differs.

    `before` None means a new file, `after` None a deleted one.
    """
    if before == after:
        return b""
    name = path.encode("utf-8", "surrogateescape")
    head = [b"diff --git a/%b b/%b\n" % (name, name)]
    if before is None:
        head.append(b"new file mode 100644\n")
    if after is None:
        head.append(b"deleted file mode 100644\n")
    source = b"/dev/null" if before is None else b"a/" + name
    target = b"/dev/null" if after is None else b"b/" + name
    old, new = _lines(before or b""), _lines(after or b"")
    return b"".join([*head, *difflib.diff_bytes(difflib.unified_diff, old, new, source, target)])


def _lines(content: bytes) -> list[bytes]:
    """Return lines as diff counts them: `splitlines` would also split at a form feed."""
    *lines, last = content.split(b"\n")
    rest = [last + b"\n\\ No newline at end of file\n"] if last else []
    return [line + b"\n" for line in lines] + rest
