"""Several real commands on one tree at the same time."""

import time
from contextlib import contextmanager

import pytest
from mqo.overlay import literals
from mqo.overlay.apply import apply, restore
from mqo.project import Project

from ..conftest import FILES, contents
from .processes import Processes

LAYERS = "megatron/core/layers.py"
TYPES = ("hifp8", "mxfp8", "mxfp4", "none")
PIN = Project.here().upstream_pin
LONG = 60  # s for which a second command may wait: the test's own machine may be slow


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path / "said")
    yield found
    found.close()


@pytest.fixture
def start(processes, mini):
    """A function that starts `mqo` on the small tree."""

    def begin(*words, **options):
        words = [*words, "--tree", mini.tree.root]
        return processes.start(mini.patches.parent, *words, **{"lock_wait_s": LONG, **options})

    return begin


@pytest.fixture
def holding(start, tmp_path):
    """A context in which a command is half-way, and holds the lock; it goes on behind it."""

    @contextmanager
    def hold(*words, at="files"):
        file = tmp_path / "hold"
        file.touch()
        started = start(*words, at=[at, 1], hold=str(file))
        steps, said = (started[1].with_suffix(ending) for ending in (".steps", ".err"))
        while at not in steps.read_text():
            assert said.read_text() == ""  # it failed, and will never come there
            time.sleep(0.01)
        yield started
        file.unlink()

    return hold


SECOND = {
    "apply": ["apply"],
    "restore": ["restore"],
    "vendor": ["vendor"],
    "snapshot": ["snapshot", "{folder}/shot"],
    "export": ["diff", "--export", "{outside}/patches"],
    "status": ["status"],
    "diff": ["diff"],
}


@pytest.mark.parametrize("second", SECOND)
def test_a_second_command_gives_up_and_names_the_first(
    mini, processes, start, holding, tmp_path_factory, second
):
    apply(mini.tree, mini.series, ["new_engine"])
    places = {"folder": mini.patches.parent, "outside": tmp_path_factory.mktemp("outside")}
    (places["folder"] / "Megatron-LM").mkdir()  # which `vendor` reads, before it asks for the lock
    (places["folder"] / "Megatron-LM/UPSTREAM.toml").write_bytes(PIN.read_bytes())
    words = [word.format(**places) for word in SECOND[second]]
    with holding("apply") as first:
        before = contents(mini.tree.root)
        refused = processes.wait(start(*words, lock_wait_s=0.1))
        assert contents(mini.tree.root) == before
        assert not (mini.patches.parent / "shot").exists()
    assert refused.code == 2
    assert f"in use by process {first[0]} (mqo apply)" in refused.err
    assert processes.wait(first).code == 0


@pytest.mark.parametrize("second", ["apply", "restore"])
def test_a_second_command_waits_for_the_first(mini, processes, start, holding, second):
    with holding("apply") as first:
        waiting = start(second)
        time.sleep(0.2)
        assert waiting[1].with_suffix(".out").read_text() == ""
    assert processes.wait(first).code == 0
    done = processes.wait(waiting)
    assert (done.code, done.err) == (0, "")
    if second == "apply":
        assert "already applied" in done.out
    else:
        assert mini.bytes() == FILES
        assert mini.tree.manifest() is None


def test_a_snapshot_and_a_reader_wait_until_the_tree_is_whole(
    mini, processes, start, holding, tmp_path
):
    apply(mini.tree, mini.series, ["new_engine"])
    with holding("apply") as first:
        waiting, reading = start("snapshot", tmp_path / "shot"), start("status")
    assert processes.wait(first).code == 0
    assert processes.wait(reading).code == 0
    assert processes.wait(waiting).code == 0
    copy = {path: (tmp_path / "shot" / path).read_bytes() for path in FILES}
    assert copy == mini.bytes()


def test_many_commands_at_once_leave_one_of_the_two_states(mini, processes, start):
    words = ["apply", "restore"] * 4
    started = [start(word) for word in words]
    ended = [processes.wait(one) for one in started]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * len(words)
    restore(mini.tree, mini.series)
    assert mini.bytes() == FILES


def test_eight_snapshots_at_once_have_their_own_types_and_leave_the_tree(
    patched, processes, start, tmp_path
):
    before = contents(patched.tree.root)
    wanted = [(fprop, dgrad) for fprop in TYPES for dgrad in ("mxfp4", "none")]
    started = [
        start("snapshot", tmp_path / f"{n}", "--type", f"fprop={fprop}", "--type", f"dgrad={dgrad}")
        for n, (fprop, dgrad) in enumerate(wanted)
    ]
    ended = [processes.wait(one) for one in started]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 8
    plain = patched.tree.read(LAYERS)
    for number, (fprop, dgrad) in enumerate(wanted):
        shot = tmp_path / str(number)
        said = {site.site: site.value for site in literals.read((shot / LAYERS).read_bytes())}
        assert said == {"fprop": fprop, "dgrad": dgrad}
        copy = {path: (shot / path).read_bytes() for path in FILES}
        assert copy == {**patched.bytes(), LAYERS: literals.write(plain, said)}
    assert contents(patched.tree.root) == before
