"""Where checkpoints of the other class are translated: in a look-alike of our own."""

import mqo.megatron.hooks
import pytest
from mqo.errors import DriftError

from .conftest import executed, sites

PATH = "megatron/training/checkpointing.py"
SOURCE = """
def load_checkpoint(model, args):
    state, checkpoint_name = read()
    gpt_compat_layer_maps, load_optim = (
        _maybe_setup_gpt_to_hybrid_load(args, state["args"], model) if state else (None, False)
    )
    for name, sub_sd in parts.items():
        if name == "model" or load_optim:
            retarget_sharded_state_dict_to_gpt_checkpoint(sub_sd, gpt_compat_layer_maps)
"""


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_our_map_is_asked_and_used(monkeypatch, with_optimizer):
    calls = []
    hooks = mqo.megatron.hooks
    monkeypatch.setattr(hooks, "layer_maps", lambda *given: (given, with_optimizer))
    monkeypatch.setattr(hooks, "retarget", lambda *given: calls.append(given))
    names = {"read": lambda: ({"args": "theirs"}, "FOLDER"), "parts": {"model": 1, "optimizer": 2}}
    scope = executed("hybrid_checkpoints", PATH, SOURCE, **names)
    scope["load_checkpoint"](["chunk"], "ours")
    states = [1, 2] if with_optimizer else [1]
    assert calls == [(state, ("ours", "theirs", ["chunk"]), "FOLDER") for state in states]


def test_a_release_that_translates_otherwise_is_drift():
    with pytest.raises(DriftError, match="_maybe_setup_gpt_to_hybrid_load"):
        sites("hybrid_checkpoints", PATH, "def load_checkpoint():\n    pass\n")
