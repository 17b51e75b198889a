"""Files as a broken disk, another version or somebody's editor leaves them, given to commands."""

import json
import random
import shutil
import stat

from mqo.errors import RunError

BEGUN = "the work would begin here"
VALUES = (
    *(None, True, -1, 1e308, float("nan"), 2**70, "", "nan", "x" * 50, "\0", "../.."),
    *([], {}, [[]], {"a": 1}, "<script>alert(1)</script>"),
)
PIECES = (b"\xff", b'"', b"{", b"[", b"0", b"-", b"=", b"\n", b"e999", b"null")


def stop(*rest, **options):
    """Stand where a command's work begins, and end it as a failure does."""
    raise RunError(BEGUN)


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


def damage_one(draw, folder):
    """Damage one of the files below a folder, whose path is returned."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    path = draw.choice(sorted(files))
    damage(draw, path)
    return path


def attempt(command_line, place, commands, seeds, look=lambda folder: None, each=None):
    """The exit codes of the commands on `place`, with one of its files damaged for each seed.

    What they make is called "made...", two folders above. What `look` sees of the folder is the
    same behind a command that ends with an error. For a seed `each` of them are run, or all.
    """
    codes, sound = set(), place.with_name("untouched")
    shutil.copytree(place, sound, symlinks=True)
    for seed in seeds:
        draw = random.Random(seed)
        damage_one(draw, place)
        for words in draw.sample(commands, each) if each else commands:
            before = look(place)
            code, out, err = command_line(*words)
            assert code != 2 or look(place) == before, (seed, words, err)
            assert code in (0, 1, 2), (seed, words)
            assert code != 2 or ": " in err, (seed, words, err)
            assert "Traceback" not in out + err, (seed, words, err)
            codes.add((code, BEGUN in err))
        undo(place, sound)
        for left in place.parent.parent.glob("made*"):
            remove(left)
    return codes


def state(folder):
    """{path below it: what shows whether it was written}."""
    return {path.relative_to(folder): _facts(path.lstat()) for path in sorted(folder.rglob("*"))}


def _facts(found):
    times = found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0
    return found.st_mode, found.st_size * bool(times), times


def undo(folder, sound):
    """Have `folder` as its copy `sound` is; modes of folders and times of files included."""
    was, now = state(sound), state(folder)
    for path in [path for path in now if now[path] != was.get(path)]:
        remove(folder / path)
    for path in [path for path in was if was[path] != now.get(path)]:
        if (sound / path).is_dir() and not (sound / path).is_symlink():
            (folder / path).mkdir(exist_ok=True)
            shutil.copystat(sound / path, folder / path)
        else:
            shutil.copy2(sound / path, folder / path, follow_symlinks=False)
    if state(folder).keys() != was.keys():  # what lay below something that was removed
        undo(folder, sound)


def remove(path):
    """Remove a file, a link or a folder, where it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
