"""Which checkpoint a model of the other class loads, and under which names."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from mqo.megatron.run import gpt_checkpoint
from mqo.megatron.run.gpt_checkpoint import layer_maps, reading_hybrid, retarget
from mqo.megatron.run.unpickle import CheckpointError

from .test_gpt_blocks import NAMES

ARGS = Namespace(finetune=False, no_load_optim=False)
SAVED = {
    "num_layers": 2,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}


def saved(**change):
    return Namespace(**SAVED | change)


def hybrid(pattern="*-*-"):
    """A model in a wrapper, as upstream has it."""
    return [SimpleNamespace(module=SimpleNamespace(decoder=None, hybrid_layer_pattern=pattern))]


def gpt(**sizes):
    config = SimpleNamespace(
        **{"num_layers": 2, "num_moe_experts": None, "multi_latent_attention": False} | sizes
    )
    return [SimpleNamespace(decoder=None, config=config)]


def refusal(saved, model):
    with pytest.raises(CheckpointError) as refused:
        layer_maps(ARGS, saved, model)
    return str(refused.value)


def test_the_same_class_is_not_translated():
    assert layer_maps(ARGS, saved(), gpt()) == (None, False)
    ours = saved(hybrid_layer_pattern="*-*-", num_layers=4)
    assert layer_maps(ARGS, ours, hybrid("*-|*-")) == (None, False)


@pytest.mark.parametrize(
    ("of_checkpoint", "model", "named"),
    [
        (saved(hybrid_layer_pattern="*-*-"), hybrid("*-*-*-"), ("*-*-", "*-*-*-")),
        (saved(), hybrid("*-*-*-"), ("*-*-", "*-*-*-")),
        (saved(), hybrid("*-*E"), ("*-*-", "*-*E")),
        (saved(multi_latent_attention=True), hybrid(), ("+-+-", "*-*-")),
        (saved(), hybrid("-*-*"), ("*-*-", "-*-*")),
        (saved(hybrid_layer_pattern="*-*-"), gpt(), ("*-*-",)),
    ],
)
def test_other_layers_than_those_of_the_checkpoint_are_refused(of_checkpoint, model, named):
    text = refusal(of_checkpoint, model)
    assert all(pattern in text for pattern in named)


def test_only_a_program_that_says_so_reads_a_hybrid_model_as_a_gpt():
    model = gpt()
    with reading_hybrid():
        maps, with_optimizer = layer_maps(ARGS, saved(hybrid_layer_pattern="*-|*-"), model)
        assert maps is not None
        assert not with_optimizer
        assert "*-*E" in refusal(saved(hybrid_layer_pattern="*-*E"), gpt())
    assert refusal(saved(hybrid_layer_pattern="*-*-"), model)


def test_the_blocks_of_a_gpt_feed_the_layers_of_a_hybrid_model():
    maps, with_optimizer = layer_maps(ARGS, saved(), hybrid("*-|*-"))
    assert with_optimizer
    assert maps.attention_to_gpt == {0: 0, 2: 1}
    assert maps.mlp_to_gpt == {1: 0, 3: 1}
    maps, _ = layer_maps(ARGS, saved(), hybrid("M*-M*-"))
    assert (maps.attention_to_gpt, maps.mlp_to_gpt) == ({1: 0, 4: 1}, {2: 0, 5: 1})
    assert maps.fresh_init == {0, 3}


@pytest.mark.parametrize("change", [{"finetune": True}, {"no_load_optim": True}])
def test_an_optimizer_stays_fresh_where_it_is_wanted(change):
    args = Namespace(**vars(ARGS) | change)
    assert layer_maps(args, saved(), hybrid())[1] is False


SHARDED = {"use_distributed_optimizer": True}
TWO = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("change", "pattern", "as_it_is"),
    [
        ({}, "*-*-", True),
        (TWO, "*-|*-", True),
        ({"dist_ckpt_optim_fully_reshardable": True}, "*-*-", False),  # it is translated by name
        (TWO, "*-*-", False),  # upstream refuses the others
        ({}, "M*-*-", False),
        (TWO, "*-*|-", False),
        (TWO | {"decoder_first_pipeline_num_layers": 1}, "*-|*-", False),
    ],
)
def test_an_optimizer_by_buckets_loads_as_it_is_if_its_stages_are_the_same(
    change, pattern, as_it_is
):
    _, translated = layer_maps(ARGS, saved(**SHARDED | change), hybrid(pattern))
    assert translated is not as_it_is


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_with_a_name_per_block_is_read_by_these_names(monkeypatch, name):
    """Both ways."""
    monkeypatch.setattr(gpt_checkpoint, "tensor_names", lambda path: ["decoder.layers.0.mlp.x"])
    maps, _ = layer_maps(ARGS, saved(num_layers=11), hybrid("*-" * 11))
    state = {"a": entry(NAMES[name]), "b": entry("output_layer._extra_state"), "c": 3}
    retarget(state, maps, "CHECKPOINT")
    assert state["a"].key == name
    assert isinstance(state["b"], LocalNonpersistentObject)
    with reading_hybrid():
        maps, _ = layer_maps(ARGS, saved(hybrid_layer_pattern="*-" * 11), gpt(num_layers=11))
    state = {"a": entry(name)}
    retarget(state, maps, "CHECKPOINT")
    assert state["a"].key == NAMES[name]


def test_a_layer_that_no_gpt_has_keeps_its_weights(monkeypatch):
    monkeypatch.setattr(gpt_checkpoint, "tensor_names", lambda path: ["decoder.layers.0.mlp.x"])
    maps, _ = layer_maps(ARGS, saved(num_layers=1), hybrid("M*-"))
    state = {"a": entry("decoder.layers.0.mixer.in_proj.weight")}
    retarget(state, maps, "CHECKPOINT")
    assert isinstance(state["a"], LocalNonpersistentObject)


def entry(name):
    return ShardedObject(name, None, (1,), (0,))
