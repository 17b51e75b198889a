"""Where ModelOpt's state is saved: in a look-alike of our own of the trainer's function."""

from types import SimpleNamespace

import mqo.megatron.run.modelopt
import pytest

from .conftest import executed

SOURCE = """
def save_checkpoint(iteration, model, non_persistent_ckpt=False):
    checkpoint_name = f"{args.save}/{iteration}"
    events.append("shards")
    start_misc = time()
    events.append("tracker")
    return start_misc
"""


@pytest.mark.parametrize("local", [False, True])
def test_it_comes_behind_the_shards_and_before_the_tracker(monkeypatch, local):
    events = []
    monkeypatch.setattr(
        mqo.megatron.run.modelopt, "save", lambda *given: events.append(("state", *given))
    )
    args = SimpleNamespace(save="there", ckpt_format="torch_dist")
    names = {"args": args, "events": events, "time": lambda: 0}
    path = "megatron/training/checkpointing.py"
    scope = executed("modelopt_state", path, SOURCE, **names)
    scope["save_checkpoint"](3, ["chunk"], local)
    state = ("state", ["chunk"], "there/3", "torch_dist")
    assert events == (["shards", "tracker"] if local else ["shards", state, "tracker"])
