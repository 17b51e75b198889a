import json
import os
import shlex
from dataclasses import asdict

import pytest
from mqo.launch import inputs
from mqo.launch.inputs import Inputs
from mqo.megatron.run.files import TRACKER


@pytest.fixture
def place(tmp_path):
    """A corpus, a tokenizer, and a checkpoint of iterations 2 and 4."""
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "words/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for iteration in (2, 4):
        folder = tmp_path / "saved" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "0.distcp").write_text("weights")
    (tmp_path / "saved" / TRACKER).write_text("4\n")
    return tmp_path


def of(place, text):
    return Inputs.read_by(shlex.split(text.replace("@", f"{place}/")))


def names(place, found):
    return {path.removeprefix(f"{place}/") for path in found.files}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("p --data-path @a --seed 1", {"a.bin", "a.idx"}),
        ("p --data-path 0.5 @a 0.5 @b", {"a.bin", "a.idx", "b.bin", "b.idx"}),
        ("p --data-path @a --x --data-path @b", {"b.bin", "b.idx"}),
        ("p --tokenizer-model @words --mock-data", {"words/tokenizer.json"}),
        ("p --load @none", set()),
        ("p --export-kd-teacher-load @saved", {"saved/iter_0000004/0.distcp"}),
        ("p --export-kd-cfg @a.bin", {"a.bin"}),
        ("p --load @saved", {"saved/iter_0000004/0.distcp"}),
        ("p --load @saved --ckpt-step 2", {"saved/iter_0000002/0.distcp"}),
        ("p --load=@saved --ckpt-step=2", {"saved/iter_0000002/0.distcp"}),
    ],
)
def test_what_a_command_reads(place, command, expected):
    assert names(place, of(place, command)) == expected


def test_the_iteration_that_a_run_goes_on_from(place):
    assert of(place, "p --load @saved").iteration == "4"
    assert of(place, "p --load @saved --ckpt-step 2").iteration == "2"
    assert of(place, "p --load @none").iteration is None


def test_without_a_tracker_it_is_the_newest_that_was_saved_to_its_end(place):
    (place / "saved" / TRACKER).unlink()
    assert of(place, "p --load @saved").iteration is None
    (place / "saved/iter_0000002/metadata.json").write_text("{}")
    assert of(place, "p --load @saved").iteration == "2"
    (place / "saved/iter_0000004/metadata.json").write_text("{}")
    assert of(place, "p --load @saved").iteration == "4"
    assert of(place, "p --load @saved --ckpt-step 2").iteration == "2"


def test_it_survives_json(place):
    found = of(place, "p --data-path @a --load @saved")
    assert Inputs(**json.loads(json.dumps(asdict(found)))) == found
    assert found.changed() == []


@pytest.mark.parametrize(("size", "what"), [(1 << 20, "sha256"), (0, "mtime")])
def test_a_file_that_is_gone_or_changed_is_named(place, monkeypatch, size, what):
    monkeypatch.setattr(inputs, "HASHED", size)
    found = of(place, "p --data-path @a --load @saved")
    facts = (place / "a.bin").stat()
    (place / "a.bin").write_text("A.bin")
    ns = facts.st_mtime_ns + (1 if what == "mtime" else 0)
    os.utime(place / "a.bin", ns=(ns, ns))
    (place / "a.idx").unlink()
    (place / "saved" / TRACKER).write_text("6")  # what came later is no matter
    assert sorted(found.changed()) == [
        f"{place}/a.bin has changed",
        f"{place}/a.idx is gone",
    ]
