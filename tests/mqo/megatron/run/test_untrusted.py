"""The reader of files from elsewhere: what it opens, and that it refuses the rest at once."""

import json
import os
import socket
import struct

import numpy as np
import pytest
from mqo.megatron.run import untrusted
from mqo.megatron.run.untrusted import UntrustedFileError
from safetensors import SafetensorError, safe_open

READERS = (
    *(untrusted.open_file, untrusted.check_file, untrusted.read_bytes, untrusted.read_text),
    *(untrusted.read_json, untrusted.read_json_object, untrusted.read_toml, untrusted.read_yaml),
    *(untrusted.read_safetensors_header, untrusted.check_npy),
    lambda path: list(untrusted.read_lines(path)),
    lambda path: untrusted.copy_file(path, path.with_name("copy")),
)


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def link_to(target):
    return lambda path: path.symlink_to(target)


ODD = {
    "a named pipe": make_pipe,
    "a socket": make_socket,
    "a folder": lambda path: path.mkdir(),
    "a device": link_to("/dev/zero"),
    "does not exist": lambda path: None,
    "Too many levels": lambda path: path.symlink_to(path),
}


def refusal(read, *words, **options):
    with pytest.raises(UntrustedFileError) as caught:
        read(*words, **options)
    return caught.value


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ODD)
def test_only_a_regular_file_is_read(tmp_path, monkeypatch, read, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = tmp_path / "file"
    ODD[kind](path.relative_to(tmp_path) if kind == "a socket" else path)
    error = refusal(read, path)
    assert kind in str(error) and str(path) in str(error) and "expected" in str(error)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["a\0b", "a\udcffb", "a" * 5000])
def test_a_name_that_no_file_should_have_is_refused_in_printable_words(tmp_path, read, name):
    error = refusal(read, tmp_path / name)
    assert str(error).isprintable() and str(error).encode()


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert untrusted.read_bytes(path, 10) == b"x" * 10
    assert "10 bytes" in str(refusal(untrusted.read_bytes, path, 9))


def test_a_file_that_hides_its_size_is_bounded_too():
    # The system says that this file is empty.
    assert "grows" in str(refusal(untrusted.read_bytes, "/proc/self/maps", 10))


def test_a_line_is_bounded_and_lines_begin_where_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_LINE", 8)
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n1234567\nend")
    assert list(untrusted.read_lines(path, 4)) == [b"two\n", b"1234567\n", b"end"]
    path.write_bytes(b"12345678\n")
    assert "lines below 8 bytes" in str(refusal(lambda: list(untrusted.read_lines(path))))


# -- links -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    """A model in a Hugging Face cache: its snapshot has a link to a blob."""
    model = tmp_path / "models--someone--model"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs/1234").write_text("content")
    (model / "snapshots/abcd").mkdir(parents=True)
    (model / "snapshots/abcd/merges.txt").symlink_to("../../blobs/1234")
    (tmp_path / "secret").write_text("secret")
    return model


def test_a_link_leads_within_a_folder_or_from_a_snapshot_to_its_blobs(cache):
    folder = cache / "snapshots/abcd"
    assert untrusted.read_text(folder / "merges.txt", within=folder) == "content"
    (folder / "own").write_text("own")
    (folder / "inside").symlink_to("own")
    assert untrusted.read_text(folder / "inside", within=folder) == "own"
    untrusted.copy_file(folder / "inside", folder / "copy", within=folder)
    assert (folder / "copy").read_text() == "own"


@pytest.mark.parametrize(
    "target",
    ["../../../secret", "../../config", "../../blobs/chain", "../other/file", "/etc/passwd"],
)
def test_no_link_leads_elsewhere(cache, target):
    (cache / "config").write_text("not a blob")
    (cache / "blobs/chain").symlink_to(cache.parent / "secret")
    (cache / "snapshots/other").mkdir()
    (cache / "snapshots/other/file").write_text("another revision")
    folder = cache / "snapshots/abcd"
    (folder / "link").symlink_to(target)
    assert "outside" in str(refusal(untrusted.read_text, folder / "link", within=folder))
    assert "outside" in str(
        refusal(untrusted.copy_file, folder / "link", folder / "copy", within=folder)
    )
    assert not (folder / "copy").exists()


def test_a_folder_of_links_leads_nowhere_either(cache):
    folder = cache / "snapshots/abcd"
    (folder / "sub").symlink_to(cache.parent)
    assert "outside" in str(refusal(untrusted.read_text, folder / "sub/secret", within=folder))


# -- nested and expanding content ------------------------------------------------------------------


def nested_json(depth):
    return "[" * depth + "]" * depth


def nested_objects(depth):
    return '{"a":' * depth + "1" + "}" * depth


def dotted_toml(depth):
    return ".".join("a" * depth) + " = 1"


def quoted_toml(depth):
    return " . ".join(['"a b"'] * depth) + " = 1"


def nested_toml(depth):
    return f"a = {nested_json(depth)}"


CONTENTS = {
    nested_json: untrusted.read_json,
    nested_objects: untrusted.read_json,
    dotted_toml: untrusted.read_toml,
    quoted_toml: untrusted.read_toml,
    nested_toml: untrusted.read_toml,
}


@pytest.mark.parametrize("make", CONTENTS)
@pytest.mark.parametrize("depth", [untrusted.MOST_NESTED + 1, 5_000, 100_000])
def test_content_nested_beyond_the_bound_is_refused(tmp_path, make, depth):
    path = tmp_path / "file"
    path.write_text(make(depth))
    assert f"{untrusted.MOST_NESTED} levels" in str(refusal(CONTENTS[make], path))
    path.write_text(make(untrusted.MOST_NESTED - 1))
    CONTENTS[make](path)


@pytest.mark.parametrize(
    "text",
    [
        nested_json(20_000),
        "a: &a [x, x]\n"
        + "".join(
            f"{c}: &{c} [*{p}, *{p}]\n"
            for p, c in zip("abcdefghijklmnopqrstuv", "bcdefghijklmnopqrstuvw", strict=True)
        ),
        "a: &a [*a]",
        "a: !!python/object/apply:os.getcwd []",
        "a: [",
    ],
    ids=["nested", "expanding", "loop", "tag", "open"],
)
def test_yaml_that_expands_or_names_code_is_refused(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    refusal(untrusted.read_yaml, path)


def test_yaml_with_a_harmless_alias_and_an_empty_file_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_text("a: &x [1]\nb: *x\n")
    assert untrusted.read_yaml(path) == {"a": [1], "b": [1]}
    path.write_text("")
    assert untrusted.read_yaml(path) is None


@pytest.mark.parametrize("content", [b"\xff", b"{", b"", b"9" * 5000])
def test_content_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    refusal(untrusted.read_json, path)


# -- weights and arrays ----------------------------------------------------------------------------


def safetensors(header, content=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def tensor(first, last, shape=(1,)):
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


def test_a_safetensors_header_is_read_if_the_tensors_lie_in_the_file(tmp_path):
    path = tmp_path / "file"
    header = {"__metadata__": {"format": "pt"}, "a": tensor(0, 4)}
    path.write_bytes(safetensors(header, b"1234"))
    assert untrusted.read_safetensors_header(path)["a"]["dtype"] == "F32"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"),
        safetensors(b"[]"),
        safetensors(nested_objects(5000).encode()),
        *(safetensors({"a": a}, b"123") for a in (tensor(0, 4), tensor(-1, 2), tensor(2, 1), 1)),
        *(safetensors({"a": tensor(0, 2, shape)}, b"12") for shape in ([-1], ["1"], 1)),
    ],
)
def test_a_safetensors_file_that_is_not_whole_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    refusal(untrusted.read_safetensors_header, path)


A, B = {"a": tensor(0, 4)}, {"b": tensor(4, 8)}
HEADERS = {
    "two tensors": A | B,
    "in another order": B | A,
    "no tensor": {},
    "an empty tensor": A | {"b": tensor(4, 4, (0, 3))},
    "a gap": A | {"b": tensor(5, 9)},
    "a gap at the start": B,
    "an overlap": A | {"b": tensor(0, 4)},
    "a part of another": A | {"b": tensor(2, 6)},
    "bytes after the tensors": A,
    "a shape of another size": {"a": tensor(0, 4, (2,))},
    "a shape of no size": {"a": tensor(0, 4, (0,))},
    "a shape beyond 64 bits": {"a": tensor(0, 4, (2**40, 2**40))},
    "a size that is true": {"a": tensor(0, 4, (True,))},
    "offsets of one number": {"a": tensor(0, 4) | {"data_offsets": [4]}},
    "a metadata of numbers": {"__metadata__": {"a": 1}} | A,
    "a metadata of lists": {"__metadata__": []} | A,
}


@pytest.mark.parametrize("size", [0, 4, 8, 9])
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_is_taken_if_the_library_of_safetensors_takes_it(tmp_path, header, size):
    path = tmp_path / "file"
    path.write_bytes(safetensors(header, bytes(size)))
    try:
        with safe_open(path, "np") as file:
            names = set(file.keys())
    except SafetensorError:
        refusal(untrusted.read_safetensors_header, path)
    else:
        assert untrusted.read_safetensors_header(path).keys() - {"__metadata__"} == names


@pytest.mark.parametrize("dtype", [*untrusted.BITS, "F32"])
def test_the_size_of_a_dtype_is_that_of_the_library(tmp_path, dtype):
    path = tmp_path / "file"
    for size in (3, 4, 8, 16, 32):
        header = {"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, size]}}
        path.write_bytes(safetensors(header, bytes(size)))
        if size * 8 == untrusted.BITS[dtype] * 4:
            untrusted.read_safetensors_header(path)
            safe_open(path, "np")
        else:
            refusal(untrusted.read_safetensors_header, path)
            with pytest.raises(SafetensorError):
                safe_open(path, "np")


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_complete_array_is_accepted(tmp_path, shape, order):
    path = tmp_path / "file.npy"
    np.save(path, np.asarray(np.random.default_rng(0).random(shape), order=order))
    untrusted.check_npy(path)


def test_an_array_cut_short_and_one_of_objects_are_refused(tmp_path):
    path = tmp_path / "file.npy"
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for size in range(0, len(whole), 50):
        path.write_bytes(whole[:size])
        refusal(untrusted.check_npy, path)
    np.save(path, np.array([{}, {}]), allow_pickle=True)
    refusal(untrusted.check_npy, path)


@pytest.mark.parametrize("shape", ["(10**12,)", "(-1,)", "(2**63, 2**63)", "'x'", "(" * 500])
def test_an_array_header_that_lies_is_refused(tmp_path, shape):
    path = tmp_path / "file.npy"
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    refusal(untrusted.check_npy, path)


# -- folders ---------------------------------------------------------------------------------------


def test_a_folder_is_listed_by_name_and_an_odd_name_is_named(tmp_path):
    for name in "ba":
        (tmp_path / name).touch()
    assert [path.name for path in untrusted.list_folder(tmp_path)] == ["a", "b"]
    (tmp_path / "c\udcff").touch()
    assert "\\xff" in str(refusal(untrusted.list_folder, tmp_path))
    refusal(untrusted.list_folder, tmp_path / "a")


def test_links_to_the_folder_itself_are_followed_once(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / name).symlink_to(".")
    (tmp_path / "below").mkdir()
    (tmp_path / "below/up").symlink_to("..")
    (tmp_path / "other\udcff").mkdir()
    skipped = []
    found = list(untrusted.walk_folders(tmp_path, lambda folder: False, skipped.append))
    assert found == [tmp_path, tmp_path / "below"]
    assert ["\\xff" in str(error) for error in skipped] == [True]


def test_folders_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_ENTRIES", 5)
    for n in range(6):
        (tmp_path / str(n)).mkdir()
    refusal(lambda: list(untrusted.walk_folders(tmp_path, lambda folder: False, print)))
    refusal(untrusted.list_folder, tmp_path)
