"""The check of a .bin/.idx pair that the user gives."""

import itertools
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.data import pair_check
from mqo.data.pair_check import HEADER, MAGIC
from mqo.errors import DataError

CODES = {2: 8, 4: 4}  # bytes of an id: upstream's code of the type


def _pair(prefix, lengths=(3, 0, 2), width=2):
    """A pair of documents of these lengths, each a sequence."""
    ends = list(itertools.accumulate(lengths))
    starts = [width * (end - length) for end, length in zip(ends, lengths, strict=True)]
    count = len(lengths)
    index = HEADER.pack(*MAGIC, CODES[width], count, count + 1)
    index += struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *starts, *range(count + 1))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    prefix.with_name(prefix.name + ".bin").write_bytes(bytes(width * sum(lengths)))


def test_a_whole_prefix_passes_even_with_a_point_in_its_name(tmp_path):
    _pair(tmp_path / "mix-v1.7_text_document")
    pair_check.check_prefix(tmp_path / "mix-v1.7_text_document")


def test_half_a_prefix_names_the_missing_half(tmp_path):
    (tmp_path / "mine.bin").touch()
    with pytest.raises(DataError) as caught:
        pair_check.check_prefix(tmp_path / "mine")
    assert caught.value.found.startswith("mine.idx is missing")
    assert "mine.bin" in caught.value.found.partition(";")[2]


def test_a_misspelt_prefix_shows_the_near_ones(tmp_path):
    _pair(tmp_path / "wikipedia_text_document")
    with pytest.raises(DataError, match=r"; .* wikipedia_text_document"):
        pair_check.check_prefix(tmp_path / "wikipaedia_text_document")


def test_a_prefix_with_an_ending_is_put_right(tmp_path):
    _pair(tmp_path / "mine")
    with pytest.raises(DataError) as caught:
        pair_check.check_prefix(tmp_path / "mine.bin")
    assert caught.value.help == f"Give the prefix without its ending: {tmp_path / 'mine'}"


def test_a_prefix_without_the_json_key_is_put_right(tmp_path):
    _pair(tmp_path / "mine_text_document")
    with pytest.raises(DataError) as caught:
        pair_check.check_prefix(tmp_path / "mine")
    assert str(tmp_path / "mine_text_document") in caught.value.help


def test_a_missing_folder_is_said_to_be_missing(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        pair_check.check_prefix(tmp_path / "nowhere" / "mine")


# -- an index that does not fit ----------------------------------------------------------------

SEQUENCES, DOCUMENTS = 18, 26  # where the header has its counts
BODY = HEADER.size


@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [
        (0, b"PK", "not an index"),
        (9, b"\x02", "not an index"),
        (17, b"\x07", "type code 7"),  # float32
        (17, b"\xff", "type code 255"),
        (SEQUENCES, b"\xff" * 8, "18,446,744,073,709,551,615"),
        (DOCUMENTS, b"\xff" * 8, "need [0-9,]+ bytes"),
        (SEQUENCES, b"\x00" * 8, "holds no documents"),
        (DOCUMENTS, b"\x00" * 8, "holds no documents"),
        (DOCUMENTS, b"\x03", "sequence 2 of 3"),
        (BODY, b"\x00\x01", r"sequences .*mine\.bin"),
        (BODY, b"\xff" * 4, r"sequences .*mine\.bin"),
        (BODY + 12, b"\xff" * 7 + b"\x7f", r"sequences .*mine\.bin"),
        (BODY + 12, b"\xff" * 8, r"sequences .*mine\.bin"),
        (BODY + 36, b"\x02", "not in order"),
        (BODY + 36, b"\xff" * 8, "not in order"),
    ],
)
def test_a_broken_index_is_named_with_its_fault(tmp_path, offset, new, says):
    prefix = tmp_path / "mine"
    _pair(prefix)
    path = prefix.with_suffix(".idx")
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        pair_check.check_prefix(prefix)
    assert caught.value.found.startswith(f"{path} ")


@pytest.mark.parametrize("kept", [0, 8, HEADER.size - 1, HEADER.size, -1])
def test_an_index_that_was_cut_short_is_refused(tmp_path, kept):
    prefix = tmp_path / "mine"
    _pair(prefix)
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"mine\.idx (is not an index|counts)"):
        pair_check.check_prefix(prefix)


def test_ids_that_were_cut_short_are_refused(tmp_path):
    prefix = tmp_path / "mine"
    _pair(prefix)
    prefix.with_suffix(".bin").write_bytes(b"123456789")
    with pytest.raises(DataError, match=r"mine\.bin, .* 9 bytes"):
        pair_check.check_prefix(prefix)


def test_documents_without_ids_are_refused(tmp_path):
    _pair(tmp_path / "mine", [0, 0])
    with pytest.raises(DataError, match=r"mine\.bin is empty"):
        pair_check.check_prefix(tmp_path / "mine")


def test_an_index_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(pair_check, "_CHUNK", 4)
    prefix = tmp_path / "mine"
    _pair(prefix, range(1, 20), width=4)
    pair_check.check_prefix(prefix)
    with prefix.with_suffix(".idx").open("r+b") as file:  # the last bound of a document
        file.seek(-8, 2)
        file.write(struct.pack("<q", 17))
    with pytest.raises(DataError, match="not in order"):
        pair_check.check_prefix(prefix)


@st.composite
def _edited(draw):
    """A good index with some bytes changed, put in or taken out, or any bytes at all."""
    with tempfile.TemporaryDirectory() as place:
        _pair(Path(place) / "mine", draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
        content = bytearray((Path(place) / "mine.idx").read_bytes())
        ids = (Path(place) / "mine.bin").read_bytes()
    if draw(st.booleans()):
        return draw(st.binary(max_size=200)), ids
    for _ in range(draw(st.integers(0, 4))):
        at, old = draw(st.integers(0, len(content))), draw(st.integers(0, 8))
        content[at : at + old] = draw(st.binary(max_size=8))
    return bytes(content), ids


@given(_edited())
def test_any_index_is_loaded_as_upstream_does_or_refused(vendored, given_files):
    datasets = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    content, ids = given_files
    with tempfile.TemporaryDirectory() as place:
        prefix = Path(place) / "mine"
        prefix.with_suffix(".idx").write_bytes(content)
        prefix.with_suffix(".bin").write_bytes(ids)
        try:
            pair_check.check_prefix(prefix)
        except DataError:
            return
        dataset = datasets.IndexedDataset(str(prefix))
        tokens = [dataset.get(at) for at in range(len(dataset))]
        assert [len(one) for one in tokens] == dataset.sequence_lengths.tolist()
