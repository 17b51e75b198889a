"""Files as a broken disk, another version or somebody's editor leaves them."""

import json

VALUES = (
    *(None, True, -1, 1e308, float("nan"), 2**70, "", "nan", "x" * 50, "\0", "../.."),
    *([], {}, [[]], {"a": 1}, "<script>alert(1)</script>"),
)
PIECES = (b"\xff", b'"', b"{", b"[", b"0", b"-", b"=", b"\n", b"e999", b"null")


def changed(draw, value):
    """The JSON value with a part of it, at any depth, replaced or taken away."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.2:
        return draw.choice(VALUES)
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    if draw.random() < 0.2:
        del value[key]
    else:
        value[key] = changed(draw, value[key])
    return value


def damage(draw, path):
    """Change a file's JSON or bytes, cut it short, or take it away."""
    content = path.read_bytes()
    kind = draw.choice(("json", "json", "bytes", "cut", "gone", "folder"))
    if kind == "json" and path.suffix in (".json", ".jsonl") and content[:1] in (b"{", b"["):
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        n = draw.randrange(len(lines))
        lines[n] = json.dumps(changed(draw, json.loads(lines[n]))).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    else:
        n = draw.randrange(len(content) + 1)
        more = b"" if kind == "cut" else draw.choice(PIECES) + content[n + draw.randrange(9) :]
        path.write_bytes(content[:n] + more)
