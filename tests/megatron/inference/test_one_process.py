"""What keeps a model from being built, before anything of it is."""

import pytest
from megatron.inference import one_process
from mqo.megatron.run.errors import SavedError
from mqo.megatron.run.unpickle import CheckpointError

LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16"
MODELS = {
    "groups": [],
    "heads": ["--untie-embeddings-and-output-weights", "--kv-channels", "48"],
    "latent": [*LATENT.split(), "--v-head-dim", "32", "--qk-layernorm"],
    "bf16": ["--bf16"],
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_size_of_the_weights_is_that_of_the_model(make, arguments, kind):
    """Within 1 %: upstream's count leaves out some norms of heads."""
    from .conftest import FLAGS, GROUPS

    base = FLAGS if kind == "groups" else " ".join(FLAGS).replace(GROUPS, "").split()
    model = make(*MODELS[kind], base=base)
    args = arguments(*MODELS[kind], base=base)
    wanted = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert one_process.weight_bytes(args) == pytest.approx(wanted, rel=0.01)
    # Also with a flag that has no effect on latents.
    args.group_query_attention |= kind == "latent"
    assert one_process.weight_bytes(args) == pytest.approx(wanted, rel=0.01)


def test_a_model_beyond_the_memory_is_refused_with_both_sizes(arguments, monkeypatch):
    args = arguments()
    one_process.check_memory(args)
    monkeypatch.setattr(one_process, "machine_bytes", lambda: 3 << 30)
    one_process.check_memory(args)
    args.padded_vocab_size = 1 << 26  # times 64 numbers of 4 bytes: 16 GiB
    with pytest.raises(SavedError, match=r"16\.0 GiB.*3\.0 GiB"):
        one_process.check_memory(args)


def test_errors_of_upstream_are_typed_and_ours_stay():
    for error in (AssertionError(), KeyError("x"), ZeroDivisionError("by\nzero"), TypeError("t")):
        with (
            pytest.raises(SavedError, match=rf"MODEL.*{type(error).__name__}") as caught,
            one_process.typed_build_errors("MODEL"),
        ):
            raise error
        assert "\n" not in str(caught.value)
    for error in (SavedError("as it was"), CheckpointError("as it was")):
        with (
            pytest.raises(type(error), match=r"^as it was"),
            one_process.typed_build_errors("MODEL"),
        ):
            raise error
