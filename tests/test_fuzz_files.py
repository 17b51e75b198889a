"""A slice of `fuzz_files.py`, and whether it notices each kind of failure."""

import pytest

from .fuzz import limited
from .fuzz.limited import Ending
from .fuzz.makers import COMMANDS, Case, Sound
from .fuzz_files import GOOD, has_leaked, judge, try_group

SEED = 1
# What a command does, and how it is judged.
PROGRAMS = {
    "pass": "used",
    "import sys; sys.exit('mqo: no file')": "refused",
    "import sys; sys.exit(1)": "no sentence",
    "raise ValueError('x')": "traceback",
    "import os; os.kill(os.getpid(), 9)": "crash",
    "import os; os._exit(70)": "crash",
    "import time; time.sleep(1000)": "hang",
    "x = bytearray(200 << 20); import time; time.sleep(1000)": "memory",
}


@pytest.mark.slow
def test_no_file_of_a_slice_is_a_failure(tmp_path):
    sound = Sound(tmp_path / "sound")
    sound.make()
    for group in COMMANDS:
        counts = try_group(group, SEED, [0], tmp_path / "cases", sound)
        assert sum(counts.values()) == 1
        assert {outcome for _, outcome in counts} <= set(GOOD), counts


@pytest.mark.slow
@pytest.mark.parametrize("code", PROGRAMS)
def test_each_way_to_end_has_its_name(tmp_path, monkeypatch, code):
    if PROGRAMS[code] == "hang":
        monkeypatch.setattr(limited, "MOST_SECONDS", 0.2)
    if PROGRAMS[code] == "memory":
        monkeypatch.setattr(limited, "_memory", lambda child: limited.MOST_MEMORY + 1)
    (tmp_path / "program.py").write_text(code)
    assert limited.run([str(tmp_path / "program.py")], tmp_path).name() == PROGRAMS[code]


def judged(folder, ended, *, must_refuse=False, same_output=False):
    """The outcome of a case of `eval` whose undamaged output is "1"."""
    sound = Sound(folder / "sound")
    sound.outputs = {"eval": "1"}
    (folder / "model").mkdir(exist_ok=True)
    case = Case("eval", [], "", folder / "ran", folder / "out", must_refuse, same_output)
    return judge(case, ended, sound)


USED, REFUSED = Ending(0, "2", "", None, 1.0), Ending(2, "", "mqo: no", None, 1.0)


def test_an_outcome_is_judged_by_what_is_known_of_the_case(tmp_path):
    assert judged(tmp_path, USED) == "used"
    assert judged(tmp_path, USED, must_refuse=True) == "wrong"
    assert judged(tmp_path, USED, same_output=True) == "wrong"
    assert judged(tmp_path, Ending(0, "1", "", None, 1.0), same_output=True) == "used"
    assert judged(tmp_path, REFUSED, must_refuse=True) == "refused"
    advice = Ending(2, "", "mqo: pass trust_remote_code=True", None, 1.0)
    assert judged(tmp_path, advice) == "advice"
    (tmp_path / "out").mkdir()
    assert judged(tmp_path, REFUSED) == "output left"
    (tmp_path / "ran").touch()
    assert judged(tmp_path, REFUSED) == "code ran"


def test_a_copy_of_a_file_outside_of_the_model_is_noticed(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    for path, text in ((tmp_path / "secret", "s"), (model / "own", "o"), (out / "merges", "s")):
        path.write_text(text)
    (model / "inside").symlink_to("own")
    (out / "inside").write_text("o")
    assert not has_leaked(model, out)
    (model / "merges").symlink_to(tmp_path / "secret")
    assert has_leaked(model, out)
