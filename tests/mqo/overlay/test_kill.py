"""Real commands, really killed: at every step of the journal, and at random instants."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from mqo.overlay import transaction
from mqo.overlay.apply import apply
from mqo.overlay.tree import Tree

from ..conftest import FILES, contents, make_mini
from .conftest import pin_text, wheel
from .killing import BUILD_PHASES, COMMIT_PHASES, ROLLED_BACK
from .processes import Processes

AT_LEAST = 10  # kills per phase of a command; of one that NAMEs entries one per step
AT_RANDOM = 10, 50
WHEEL = "megatron_core-1.2.4-cp311-cp311-any.whl"
NEXT = {
    **FILES,
    "megatron/core/package_info.py": b"MAJOR = 1\nMINOR = 2\nPATCH = 4\n",
    "megatron/core/new/deep.py": b"x = 1\r\n",
}
del NEXT["megatron/core/table.bin"]
# What each command is, and whether its tree is patched before.
COMMANDS = {
    "apply": (["apply"], False),
    "apply NAME": (["apply", "quant_sites"], False),
    "restore": (["restore"], True),
    "restore NAME": (["restore", "new_engine"], True),
    "vendor": (["vendor", "--from", "{project}/" + WHEEL], False),
    "snapshot": (["snapshot", "{project}/runs/1/source", "--type", "fprop=mxfp8"], True),
    "diff --export": (["diff", "--export", "{project}/new/patches"], True),
}
BUILDING = ("snapshot", "diff --export")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    found = Processes(tmp_path_factory.mktemp("driver") / "said")
    yield found
    found.close()


@dataclass
class Tally:
    """{command: kills per phase}, and what was torn."""

    kills: dict[str, Counter] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    def __str__(self):
        phases = ["none", *COMMIT_PHASES, *BUILD_PHASES]
        lines = ["kills per phase (none: before the first step)"]
        for name, kills in {"": {p: p for p in phases}, **self.kills}.items():
            lines.append(f"{name:14}" + "".join(f"{kills[phase]:>9}" for phase in phases))
        return "\n".join([*lines, f"torn trees: {len(self.torn)} {self.torn or ''}"])


@pytest.fixture(scope="module")
def tally():
    """Printed when all is over."""
    found = Tally()
    yield found
    print(f"\n\n{found}")


class Scene:
    """A command, and a project to run it in, as often as one likes."""

    def __init__(self, command, folder, processes, caplog):
        self.command, self.processes, self.caplog, self.turn = command, processes, caplog, 0
        words, patched = COMMANDS[command]
        self.origin, self.project = folder / "origin", folder / "project"
        self.origin.mkdir()
        mini = make_mini(self.origin)
        mini.path("core/layers.py").chmod(0o755)
        mini.path("core/gadget.py").chmod(0o600)
        content = wheel(NEXT)
        (self.origin / WHEEL).write_bytes(content)
        (self.origin / "Megatron-LM").mkdir()
        (self.origin / "Megatron-LM/UPSTREAM.toml").write_text(pin_text({WHEEL: content}))
        if patched:
            apply(mini.tree, mini.series)
        self.words = [word.format(project=self.project) for word in words]
        if command == "diff --export":  # which refuses to write into its own project
            self.words[-1] = str(folder / "project-patches/new/x")

    def fresh(self):
        for path in (self.project, self.project.parent / "project-patches"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.origin, self.project)
        (self.project.parent / "project-patches").mkdir()

    def start(self, *words, **options):
        tree = ["--tree", str(self.project / "tree")]
        return self.processes.start(self.project, *words, *tree, **options)

    def run(self, *words, **options):
        return self.processes.wait(self.start(*words, **options))

    def state(self):
        folders = {"project": self.project, "patches": self.project.parent / "project-patches"}
        found = {name: contents(folder) for name, folder in folders.items()}
        found["project"].pop("tree/.mqo", None)  # a folder's mode tells nothing
        return found

    def ends(self):
        """The states before and after, the command's steps, and when, in s from its start, it
        reaches the first and ends.
        """
        self.fresh()
        before, begun = self.state(), time.monotonic()
        done = self.run(*self.words)
        assert done.code == 0, done.err
        took, after = time.monotonic() - begun, self.state()
        assert before != after
        return before, after, done.steps, (done.first_step - begun, took)

    def next_command(self):
        """What the next command says about the killed one: each fourth time a real one."""
        self.turn += 1
        if self.turn % 4 == 0:
            looked = self.run("status")
            assert looked.code in (0, 1), looked.err
            assert looked.err == "" or looked.err.startswith("mqo: ")
            return looked.err.removeprefix("mqo: ")
        self.caplog.clear()
        Tree(self.project / "tree").settle()
        return "".join(record.getMessage() for record in self.caplog.records)

    def judge(self, killed, before, after, tally):
        """The phase the command was killed in; the next one must say so, and find no torn tree."""
        assert killed.code == -signal.SIGKILL
        phase = killed.steps[-1] if killed.steps else "none"
        interrupted = transaction.is_interrupted(self.project / "tree")
        said = self.next_command()
        words = self.words[0] if self.words[0] != "diff" else "diff --export"
        # The name is lost when the command was killed while it wrote that down.
        names = (f"'{words}' was killed ", "a command was killed")
        assert said.startswith(names) if interrupted else said == ""
        state = self.state()
        if state not in (before, after):
            tally.torn.append(f"{self.command} in {phase}")
        elif interrupted and "removed what it left" not in said:
            assert (state == after) == ("finished it first" in said)
        assert not transaction.is_interrupted(self.project / "tree")
        return phase


@pytest.fixture
def scene(request, tmp_path, processes, caplog):
    return Scene(request.param, tmp_path, processes, caplog)


@pytest.mark.parametrize("scene", COMMANDS, indirect=True)
def test_a_command_killed_at_every_step_is_undone_or_finished_by_the_next(scene, tally):
    before, after, steps, _ = scene.ends()
    occurrences = Counter(steps)
    assert tuple(occurrences) == (BUILD_PHASES if scene.command in BUILDING else COMMIT_PHASES)
    kills = tally.kills[scene.command] = Counter()
    least = 1 if "NAME" in scene.command else AT_LEAST
    for phase, often in occurrences.items():
        for turn in range(max(least, often)):
            scene.fresh()
            at = [phase, turn % often + 1]
            killed = scene.run(*scene.words, at=at)
            assert scene.judge(killed, before, after, tally) == phase
            assert scene.state() == (before if phase in ROLLED_BACK else after), at
            kills[phase] += 1
    assert tally.torn == []
    assert all(kills[phase] >= max(least, often) for phase, often in occurrences.items())


@pytest.mark.parametrize(
    "often", [AT_RANDOM[0], pytest.param(AT_RANDOM[1], marks=pytest.mark.heavy)]
)
def test_commands_killed_at_random_are_undone_or_finished_too(
    tmp_path, processes, caplog, tally, often
):
    chance = random.Random(often)
    scenes = []
    for number, command in enumerate(COMMANDS):
        (tmp_path / str(number)).mkdir()
        scenes.append(Scene(command, tmp_path / str(number), processes, caplog))
    ends = {scene.command: scene.ends() for scene in scenes}
    kills = tally.kills["at random"] = Counter()
    turn = 0
    while kills.total() < often:
        turn += 1
        scene = scenes[turn % len(scenes)]
        before, after, _, (first_step, took) = ends[scene.command]
        scene.fresh()
        started = scene.start(*scene.words)
        # Every other one at work on files, which is a small part of a command's time.
        time.sleep(chance.uniform(first_step if turn % 2 else 0, took))
        os.kill(started[0], signal.SIGKILL)  # ends a process that has ended already no more
        killed = processes.wait(started)
        if killed.code == -signal.SIGKILL:
            kills[scene.judge(killed, before, after, tally)] += 1
        else:
            assert scene.state() == after
    assert tally.torn == []
