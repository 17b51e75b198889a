"""What a checkpoint's pickles may hold: records and weights, and no code that would run."""

import dataclasses
import io
import json
import os
import pickle
import random
import re
import resource
import subprocess
import tarfile
import traceback
import zipfile
from argparse import Namespace
from pathlib import Path

import megatron.core  # noqa: F401  (registers what is safe in a checkpoint)
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.inference.checkpointing import common_state
from mqo.megatron.run import unpickle
from mqo.megatron.run.checkpoints import CheckpointError, before_load
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata, planner

# torch says that no group is there, where none is meant to be.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

COMMON = "common_state/shard_0_1"
STATE = {"weight": torch.ones(4, 4).bfloat16(), "optimizer": {"step": torch.tensor(7.0)}}
SHARDED = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
SHARDED |= {"common_backend": "torch", "common_backend_version": 1}


class Command:
    """Pickles as a call of os.system that makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *of):
        self.function, self.of = function, of

    def __reduce__(self):
        return self.function, self.of


@pytest.fixture
def marker(tmp_path):
    """The file that a payload makes, if it runs."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path):
    """A function that writes a checkpoint with `args`; the iteration's folder."""

    def make(args=None):
        made = tmp_path / "checkpoints/iter_0000002"
        made.mkdir(parents=True)
        write(made, args or Namespace(iteration=2))
        (made / "metadata.json").write_text(json.dumps(SHARDED))
        (made.parent / "latest_checkpointed_iteration.txt").write_text("2")
        return made

    return make


def write(folder, args):
    """A checkpoint as Megatron writes it: what is no tensor is a file within a pickle.

    A Command is in the pickle itself, which torch loads; what is in [a Command] is Megatron's.
    """
    common = io.BytesIO()
    torch.save([{"args": args}], common)
    common = args if isinstance(args, Command) else common
    checkpoint.save(STATE | {COMMON: common}, checkpoint_id=folder, no_dist=True)


def resume(folder):
    before_load(Namespace(load=str(folder.parent), save=None, ckpt_step=None))


def read(folder):
    """What torch makes of `.metadata`."""
    return checkpoint.FileSystemReader(folder).read_metadata()


def load(folder):
    """What torch makes of all of a checkpoint."""
    wanted = {"weight": torch.empty(4, 4, dtype=torch.bfloat16), COMMON: io.BytesIO()}
    wanted["optimizer"] = {"step": torch.empty(())}
    checkpoint.load(wanted, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True)
    return wanted


def change_place(folder, key, **fields):
    """Have `.metadata` say another place of an entry; of the first one without a key."""
    known = read(folder)
    at = next(index for index in known.storage_data if key in (None, index.fqn))
    known.storage_data[at] = dataclasses.replace(known.storage_data[at], **fields)
    (folder / ".metadata").write_bytes(pickle.dumps(known))


# -- .metadata ---------------------------------------------------------------------------------


def test_a_good_checkpoint_is_read(folder):
    made = folder()
    resume(made)
    assert isinstance(read(made), metadata.Metadata)
    assert torch.equal(load(made)["weight"], STATE["weight"])


@pytest.mark.parametrize("way", [resume, read, load])
@pytest.mark.parametrize("first", [None, Call(getattr, torch.Size, "x", None)])
def test_a_metadata_file_that_names_a_command_is_refused_and_runs_nothing(
    folder, marker, way, first
):
    made = folder()
    (made / ".metadata").write_bytes(pickle.dumps([first, Command(marker)]))
    with pytest.raises((CheckpointError, checkpoint.CheckpointException), match=r"\.metadata"):
        way(made)
    assert not marker.exists()


def test_the_refusal_names_the_file_and_what_it_wanted(folder, marker):
    made = folder()
    (made / ".metadata").write_bytes(pickle.dumps(Command(marker)))
    with pytest.raises(CheckpointError, match=rf"{made}/\.metadata would run \w+\.system"):
        resume(made)


def refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError) as found:
        unpickle.check_metadata(tmp_path)
    return str(found.value)


@pytest.mark.parametrize("name", ["os.system", "sys.modules"])
def test_a_dotted_name_of_a_known_module_is_refused(tmp_path, name):
    # The protocol lets a name go through a module's attributes.
    module = "torch.distributed.checkpoint.filesystem"
    names = [
        pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode() for part in (module, name)
    ]
    text = pickle.PROTO + b"\x04" + b"".join(names) + pickle.STACK_GLOBAL + pickle.STOP
    assert f"{module}.{name}" in refused(tmp_path, text)


@pytest.mark.parametrize(
    "of",
    [
        (planner.WriteItemType, "mro"),
        (planner.WriteItemType, "TENSOR", None),
        (type(Path()), "rmdir"),
        (metadata.Metadata, "__init__"),
        (torch.Size, "x", None),
    ],
)
def test_of_attributes_a_member_of_a_known_enumeration_alone_is_taken(tmp_path, of):
    assert "builtins.getattr" in refused(tmp_path, pickle.dumps(Call(getattr, *of)))
    member = pickle.dumps(Call(getattr, planner.WriteItemType, "TENSOR"))
    assert unpickle.Reader(io.BytesIO(member)).load() is planner.WriteItemType.TENSOR


@pytest.mark.parametrize("kind", [metadata.Metadata, type(Path()), planner.WriteItemType])
def test_attributes_of_a_class_are_not_set(tmp_path, kind):
    # The class itself, then BUILD with a state of slots: pickle sets them one by one.
    state = pickle.dumps((None, {"set_by_a_file": 1}), protocol=2)[2:-1]
    text = pickle.dumps(kind, protocol=2)[:-1] + state + pickle.BUILD + pickle.STOP
    refused(tmp_path, text)
    assert not hasattr(kind, "set_by_a_file")


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04K", pickle.dumps({}), b"\x80\x04\x95" + b"\x7f" * 8, b"]r\xff" * 9]
)
def test_a_damaged_or_other_file_is_refused(tmp_path, content):
    assert ".metadata" in refused(tmp_path, content)


@pytest.mark.parametrize("odd", [[1], {1: 2}, {metadata.MetadataIndex("a"): 3}])
def test_records_of_places_that_are_other_values_are_refused(tmp_path, odd):
    refused(tmp_path, pickle.dumps(metadata.Metadata({}, storage_data=odd)))


def test_a_missing_file_is_not_refused(tmp_path):
    unpickle.check_metadata(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_folder_is_tried_once_and_again_if_a_file_changes(
    folder, marker, one_rank, monkeypatch, name
):
    tried, try_first = [], unpickle.try_first
    monkeypatch.setattr(
        unpickle, "try_first", lambda work, *rest: tried.append(work) or try_first(work, *rest)
    )
    made = folder()
    torch.save({"args": Namespace(iteration=2)}, made / "common.pt")
    resume(made)
    resume(made)
    assert len(tried) == 2
    status = (made / name).stat()
    content = pickle.dumps(Command(marker)).ljust(status.st_size, b".")
    (made / name).write_bytes(content[: status.st_size])
    os.utime(made / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointError):
        common_state(made)
    assert len(tried) > 2 and not marker.exists()


# -- entries that are no tensors ---------------------------------------------------------------


def test_an_entry_that_names_a_command_is_refused_and_runs_nothing(folder, marker):
    made = folder(args=Command(marker))
    with (
        pytest.raises(CheckpointError, match=r"common_state.*\w+\.system"),
        unpickle.typed_errors(),
    ):
        load(made)
    assert not marker.exists()


@pytest.mark.parametrize("way", ["evaluate", "teacher", "modelopt"])
@pytest.mark.parametrize("within", [False, True])
def test_each_way_to_the_arguments_refuses_the_command(folder, marker, one_rank, way, within):
    from megatron.inference import checkpointing, load_model

    made = folder(args=[Command(marker)] if within else Command(marker))
    if way == "modelopt":
        made.rename(made.parent / "inner")
        made.mkdir()
        (made.parent / "inner").rename(made / "modelopt_state")
    with pytest.raises(CheckpointError, match=r"\w+\.system"):
        if way == "evaluate":
            checkpointing.read_args(load_model.find_checkpoint(made.parent))
        elif way == "teacher":
            checkpointing.read_arguments(made.parent)
        else:
            checkpointing.load_modelopt_state(made.parent)
    assert not marker.exists()


def test_arguments_have_the_names_of_this_release(folder, one_rank):
    from megatron.inference import checkpointing

    made = folder(args=Namespace(norm_epsilon=1e-6))
    assert vars(checkpointing.read_args(made)) == {"layernorm_epsilon": 1e-6}
    assert checkpointing.read_arguments(made.parent) == {"layernorm_epsilon": 1e-6}


def test_the_environment_cannot_lift_the_restriction(monkeypatch, marker):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    unpickle.protect()
    file = io.BytesIO()
    torch.save(Command(marker), file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert not marker.exists()


# -- random edits ------------------------------------------------------------------------------


def edited(content, seed):
    """`content` with up to four bytes replaced, removed or added, or cut off, by `seed`."""
    draw, made = random.Random(seed), bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(made))
        kind = draw.choice(["replace", "remove", "add", "call", "cut"])
        if kind == "replace":
            made[at] = draw.randrange(256)
        elif kind == "remove":
            del made[at : at + draw.randint(1, 8)]
        elif kind == "add":
            made[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == "call":
            made[at:at] = b"cposix\nsystem\n(V:\ntR"
        else:
            del made[at + 1 :]
        made = made or bytearray(b"\0")
    return bytes(made)


def check_edits(made, seed):
    """Load or refuse; what the edited file calls is recorded, and must be nothing."""
    path = made / (".metadata" if seed % 2 else "__0_0.distcp")
    before, ran = path.read_bytes(), []
    path.write_bytes(edited(before, seed))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((os, "system"), (os, "popen"), (subprocess, "Popen")):
            patch.setattr(module, name, lambda *args, **kwargs: ran.append(args))
        patch.setattr("posix.system", lambda *args: ran.append(args))
        try:
            load(made)
            outcome = "loaded"
        except (Exception, checkpoint.CheckpointException):
            outcome = "refused"
    path.write_bytes(before)
    assert not ran
    return outcome


FIXTURE_IS_RESTORED = (HealthCheck.function_scoped_fixture,)


@settings(max_examples=25, suppress_health_check=FIXTURE_IS_RESTORED)
@given(seed=st.integers(0, 2**32))
def test_random_edits_load_or_are_refused_and_run_nothing(once, seed):
    check_edits(once, seed)


@pytest.mark.heavy
def test_two_thousand_random_edits_run_nothing(folder):
    made = folder()
    outcomes = [check_edits(made, seed) for seed in range(2000)]
    assert {"loaded", "refused"} == set(outcomes)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A checkpoint for edits that are undone."""
    made = tmp_path_factory.mktemp("once")
    write(made, Namespace(iteration=2))
    return made


# -- what torch says -------------------------------------------------------------------------------

ADVICE = ("weights_only", "safe_globals", "likely succeed", "trusted source")


def legacy_tar(path, marker):
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle", "sys_info"):
            tar.addfile(tarfile.TarInfo(name))


def torchscript(path, marker):
    torch.jit.save(torch.jit.script(torch.nn.Identity()), path)


def zipped(path, marker):
    torch.save({"args": Command(marker)}, path)


def legacy_pickle(path, marker):
    torch.save({"args": Command(marker)}, path, _use_new_zipfile_serialization=False)


def old_protocol(path, marker):
    torch.save({"args": Command(marker)}, path, pickle_protocol=4)


def bare_pickle(path, marker):
    path.write_bytes(pickle.dumps(Command(marker)))


FORMS = (legacy_tar, torchscript, zipped, legacy_pickle, old_protocol, bare_pickle)


def chain(error):
    """All that a traceback of an error shows."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_file_makes_torch_advise_to_load_it(tmp_path, marker, form):
    path = tmp_path / "common.pt"
    form(path, marker)
    with pytest.raises(CheckpointError) as caught, unpickle.typed_errors():
        torch.load(path, map_location="cpu")
    assert not [words for words in ADVICE if words in chain(caught.value)]
    assert not marker.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["weight", "optimizer.step"])
def test_no_tensor_of_a_shard_makes_torch_advise_to_load_it(folder, marker, tmp_path, form, key):
    made = folder()
    form(tmp_path / "payload", marker)
    payload = (tmp_path / "payload").read_bytes()
    (made / "payload").write_bytes(payload)
    change_place(made, key, relative_path="payload", offset=0, length=len(payload))
    with pytest.raises(CheckpointError) as caught, unpickle.typed_errors():
        load(made)
    assert not [words for words in ADVICE if words in chain(caught.value)]
    assert not marker.exists()


def archive(content, compression=zipfile.ZIP_STORED, *, pickled=None):
    """What torch.save writes of `content`, packed again, with another pickle in it."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(content, saved)
    with zipfile.ZipFile(saved) as read, zipfile.ZipFile(packed, "w", compression) as written:
        for name in read.namelist():
            other = pickled if name.endswith("/data.pkl") else None
            written.writestr(name, other or read.read(name))
    return packed.getvalue()


def old_form():
    file = io.BytesIO()
    torch.save(STATE["weight"], file, _use_new_zipfile_serialization=False)
    return file.getvalue()


HEX = b"".join([b"c_codecs\nencode\n("] * 40 + [b"X\x01\0\0\0a"] + [b"X\x03\0\0\0hextR"] * 40)
SHARDS = {  # entry, changes of its place, words of the refusal
    "a bomb": (lambda: archive(torch.zeros(1 << 24), zipfile.ZIP_DEFLATED), {}, "expands to"),
    "an older form": (old_form, {}, "that torch.save did not"),
    "no archive": (lambda: b"x" * 1000, {}, "that torch.save did not"),
    "a cut shard": (lambda: archive(STATE["weight"]), {"length": 10**9}, "are expected"),
    "a negative place": (lambda: archive(STATE["weight"]), {"offset": -1}, r"\(-1, "),
    "another form": (
        *(lambda: archive(STATE["weight"]), {"transform_descriptors": ["stream.zstd"]}),
        r"stream\.zstd",
    ),
    "bytes of a length": (lambda: archive(Call(bytearray, 10**9)), {}, "is damaged"),
    "a long pickle": (
        lambda: archive(STATE["weight"], pickled=pickle.dumps("x" * 70_000, 2)),
        *({}, "describes a tensor in 70,"),
    ),
    "bytes that grow": (lambda: archive(1, pickled=b"\x80\x02" + HEX + b"."), {}, "is damaged"),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_an_entry_takes_no_more_memory_than_its_shard_has_bytes(folder, kind):
    made = folder()
    make, changes, words = SHARDS[kind]
    (made / "payload").write_bytes(make())
    place = {"relative_path": "payload", "offset": 0, "length": len(make())}
    change_place(made, "weight", **place | changes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=words), unpickle.typed_errors():
        load(made)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 19)  # KiB


def test_bytes_as_pickle_writes_them_are_loaded(tmp_path):
    content = {"a": b"\0\xff" * 9, "b": bytearray(b"12"), "c": bytearray()}
    torch.save(content, tmp_path / "file")
    assert torch.load(tmp_path / "file", weights_only=True) == content


@pytest.mark.parametrize("wrap", [ValueError, RuntimeError, None])
def test_a_refusal_that_another_error_wraps_is_explained(wrap):
    try:
        try:
            raise pickle.UnpicklingError("weights_only set to False will likely succeed")
        except pickle.UnpicklingError as error:
            if wrap is None:
                raise
            raise wrap("common.pt cannot be loaded") from error
    except Exception as error:
        found = unpickle.explain(error)
    assert found and not [words for words in ADVICE if words in str(found)]


def test_an_error_of_another_kind_is_none():
    assert unpickle.explain(ValueError("the shapes differ")) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt"])
def test_only_a_regular_file_is_read(folder, name, make):
    if name != ".metadata" and make is os.mkdir:
        pytest.skip("a checkpoint may have folders, which torch refuses to open")
    made = folder()
    (made / name).unlink(missing_ok=True)
    make(made / name)
    with pytest.raises(CheckpointError, match=name):
        resume(made)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "sub/file", ".."])
def test_a_metadata_file_names_only_files_of_its_folder(folder, name):
    made = folder()
    change_place(made, None, relative_path=name)
    with pytest.raises(CheckpointError, match=re.escape(f" {name}, ")):
        resume(made)


@pytest.mark.parametrize("load", [common_state, resume])
def test_a_pickle_that_asks_for_a_terabyte_is_refused(folder, one_rank, load):
    made = folder()
    write(made, Namespace(x=Call(torch.UntypedStorage, 10**13)))
    with pytest.raises(CheckpointError, match="memory"):
        load(made)
