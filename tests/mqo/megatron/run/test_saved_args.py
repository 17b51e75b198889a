"""The schema of a checkpoint's arguments: whatever a value is, it is taken, reset or refused."""

import math
from argparse import ArgumentParser, Namespace

import pytest
import torch
from megatron.inference.arguments import add_modelopt_args
from mqo.megatron.run.args_table import read_table
from mqo.megatron.run.saved_args import (
    all_kinds,
    check_kinds,
    checked_arguments,
    model_arguments,
    refuse_unknown,
    upstream_parser,
    with_names_of_this_release,
)
from mqo.megatron.run.unpickle import CheckpointError

TABLE = read_table()
SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 1,
}
NESTED = {"a": {"b": [1, {"c": None}]}}
VALUES = {
    "text": "words",
    "list": [1, 2, 3],
    "empty list": [],
    "None": None,
    "negative": -7,
    "zero": 0,
    "fraction": 0.5,
    "huge": 2**62,
    "NaN": math.nan,
    "infinity": math.inf,
    "beyond floats": 10**5000,
    "true": True,
    "nested": NESTED,
    "device": "/dev/zero",
    "folder": "/tmp/a-folder-to-write",
    "nul": "a\0b",
    "object": Namespace(hidden_size=3),
    "tensor": torch.ones(3),
}
RECORDS = {"mqo_types", "mqo_operands", "mqo_plugins", "mqo_states"}


def taken(**change):
    return model_arguments(SIZES | change, "CHECKPOINT")


def actions():
    return upstream_parser()


def accepted(label):
    """The arguments that are taken with a value, as given."""
    found = set()
    for name in TABLE.taken | TABLE.unsupported:
        try:
            made = taken(**{name: VALUES[label]})
        except CheckpointError as error:
            assert name in str(error) or name.endswith("_path"), error
            continue
        if name in made:
            assert made[name] is VALUES[label]
            found.add(name)
    return found


def named(*types, nargs=None):
    """The arguments that the parser gives one of these types, without choices."""
    return {
        name
        for name in TABLE.taken & actions().keys()
        if actions()[name].type in types
        and actions()[name].nargs == nargs
        and actions()[name].choices is None
    }


def of_layers():
    """The arguments that a function of upstream's parses: which layers are meant."""
    kinds = {name: actions()[name].type for name in TABLE.taken & actions().keys()}
    others = (int, float, str, None)
    return {name for name, kind in kinds.items() if kind not in others and callable(kind)}


# -- every argument, with every value --------------------------------------------------------------


@pytest.mark.parametrize("label", VALUES)
def test_what_does_not_describe_the_model_is_reset(label):
    """Or it is refused, if a program reads it for something else."""
    for name in sorted(TABLE.names - TABLE.taken - TABLE.unsupported):
        try:
            assert taken(**{name: VALUES[label]}) == SIZES
        except CheckpointError as error:
            assert name in TABLE.read
            assert name in str(error)


def test_a_text_is_taken_only_for_a_text():
    texts = named(str, None)
    assert {"tokenizer_model", "split"} <= texts
    assert accepted("text") - texts == {"mqo_modelopt_format"}
    assert accepted("folder") - texts == {"mqo_modelopt_format"}
    other = {"heterogeneous_layers_config_path", "hybrid_layer_pattern"}
    assert accepted("text") | other >= texts
    assert accepted("device") == accepted("text") - TABLE.files
    assert accepted("nul") == set()


def test_a_list_of_numbers_is_taken_only_for_layers_and_lists():
    assert {"moe_layer_freq", "no_rope_freq", "window_size"} <= of_layers()
    assert accepted("list") == of_layers() | {"moe_aux_loss_coeff", "mrope_section"}
    assert accepted("empty list") == set()


def test_none_is_taken_only_if_it_is_the_default():
    optional = {name for name in actions() if actions()[name].default is None}
    recorded = {"mqo_modelopt_format"}
    assert accepted("None") == ((TABLE.taken & optional) - TABLE.needed) | recorded


def test_numbers_are_taken_only_in_their_range():
    assert accepted("negative") == {"glu_linear_offset"}
    assert accepted("huge") == accepted("NaN") == accepted("infinity") == set()
    assert accepted("beyond floats") == set()
    positive = {name for name, (least, _) in TABLE.ranges.items() if least > 0}
    assert {"hidden_size", "seq_length", "vocab_size", "micro_batch_size"} <= positive
    assert positive & accepted("zero") == set()
    others = named(int, float) - positive
    assert accepted("zero") == others | of_layers() | {"moe_aux_loss_coeff"}


def test_a_fraction_is_taken_only_for_a_float():
    assert named(float) <= accepted("fraction") <= named(float) | {"moe_aux_loss_coeff"}


def test_true_is_taken_only_for_a_switch():
    switches = {name for name in TABLE.taken & actions().keys() if actions()[name].nargs == 0}
    assert accepted("true") == switches


@pytest.mark.parametrize("label", ["nested", "object", "tensor"])
def test_no_table_is_taken(label):
    assert accepted(label) == set()


def test_choices_are_those_of_the_parser():
    for name in sorted(TABLE.taken & actions().keys()):
        choices = list(actions()[name].choices or ())
        for choice in choices:
            assert taken(**{name: choice})[name] == choice
        if choices:
            with pytest.raises(CheckpointError, match=name):
                taken(**{name: "another"})


@pytest.mark.parametrize("name", sorted(TABLE.ranges))
def test_a_range_includes_its_ends(name):
    for value in TABLE.ranges[name]:
        check_kinds({name: value}, "CHECKPOINT")
    for value in (TABLE.ranges[name][0] - 1, TABLE.ranges[name][1] + 1):
        with pytest.raises(CheckpointError, match=name):
            check_kinds({name: value}, "CHECKPOINT")


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_records_of_mqo_are_tables_of_texts(name):
    assert taken(**{name: {"fprop": "mxfp8"}})[name] == {"fprop": "mxfp8"}
    for value in ([], "mxfp8", None, {"fprop": 1}, {1: "mxfp8"}, NESTED):
        with pytest.raises(CheckpointError, match=name):
            taken(**{name: value})


# -- the model -------------------------------------------------------------------------------------


def test_a_model_of_the_parser_is_taken_as_it_is():
    """Each default of the parser has the kind that the schema asks for."""
    parsed = {name: action.default for name, action in upstream_parser().items()}
    made = model_arguments(parsed | SIZES, "CHECKPOINT")
    assert made.keys() == TABLE.taken & parsed.keys()
    assert all(made[name] == (parsed | SIZES)[name] for name in made)
    check_kinds(parsed | SIZES, "CHECKPOINT")


# Arguments of older releases, and of checkouts with megatron.post_training.
NOT_PARSED = ("trainer", "records", "older_releases", "post_training")
ELSEWHERE = {"hybrid_attention_ratio", "hybrid_mlp_ratio", "export_model_type"}


def test_the_table_lists_the_arguments_of_the_parser():
    """test_published_models.py does the same for those that validation adds."""
    groups = (TABLE.no_effect[name] for name in NOT_PARSED)
    not_parsed = frozenset().union(*groups, ELSEWHERE)
    ours = {action.dest for action in add_modelopt_args(ArgumentParser(add_help=False))._actions}
    assert upstream_parser().keys() | ours == TABLE.names - not_parsed


def test_each_argument_that_is_taken_has_a_kind():
    assert TABLE.taken - all_kinds().keys() == ELSEWHERE
    assert ELSEWHERE & upstream_parser().keys() == set()


@pytest.mark.parametrize("name", sorted(TABLE.needed))
def test_a_size_that_is_needed_must_be_there(name):
    rest = {key: value for key, value in SIZES.items() if key != name}
    with pytest.raises(CheckpointError, match=name):
        model_arguments(rest, "CHECKPOINT")
    check_kinds(rest, "CHECKPOINT")
    with pytest.raises(CheckpointError, match=name):
        check_kinds(rest | {name: None}, "CHECKPOINT")


@pytest.mark.parametrize("name", sorted(TABLE.unsupported))
def test_another_kind_of_model_is_refused(name):
    value = True if actions()[name].nargs == 0 else "M*-"
    with pytest.raises(CheckpointError, match=name):
        taken(**{name: value})
    check_kinds({name: value}, "CHECKPOINT")  # a training may load it


EXPERTS = {"multi_latent_attention": True, "num_experts": 4}


def test_the_layers_of_a_hybrid_model_are_taken_without_its_pipeline_stages():
    assert taken(hybrid_layer_pattern="*-|*-")["hybrid_layer_pattern"] == "*-*-"
    assert taken(hybrid_layer_pattern="+-|+E", **EXPERTS)["hybrid_layer_pattern"] == "+-+E"
    sizes = {"mamba_num_heads": 2, "mamba_head_dim": 8}
    mamba = taken(hybrid_layer_pattern="M*-", **sizes)
    assert mamba.items() >= sizes.items()


@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        ("*G", {}),
        ("", EXPERTS | {"hybrid_layer_pattern": 3}),
        ("*-" * 20_000, {}),
        ("*E", {}),
        ("+-", {}),
        ("*-", {"num_experts": 4}),
        ("*E", EXPERTS),
        ("*+E", EXPERTS),
    ],
)
def test_layers_that_no_program_builds_are_refused(pattern, rest):
    with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
        taken(**{"hybrid_layer_pattern": pattern} | rest)


def test_an_older_hybrid_model_is_refused():
    assert "hybrid_mlp_ratio" not in taken(hybrid_mlp_ratio=0.0)
    with pytest.raises(CheckpointError, match="hybrid_mlp_ratio"):
        taken(hybrid_mlp_ratio=0.5)


def test_the_arguments_that_a_checkout_adds_for_modelopt_are_known():
    added = {"export_kv_cache_quant": "none", "export_real_quant_cfg": "None"}
    added |= {"finetune_data_split": "train", "export_model_type": "GPTModel"}
    assert not taken(**added).keys() & added.keys()
    with pytest.raises(CheckpointError, match="export_model_type"):
        taken(export_model_type="HybridModel")


def test_layers_that_differ_bring_their_description(tmp_path):
    path, content = "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"
    assert taken(**{path: "gone.json", content: "{}"})[path] == "gone.json"
    with pytest.raises(CheckpointError, match=content):
        taken(**{path: str(tmp_path)})


@pytest.mark.parametrize(
    "value", ["megatron.core.a", [], ["megatron.core.a"], ["os", "system"], ["megatron.cores", "x"]]
)
def test_layers_come_from_megatron_only(value):
    fine = ["megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"]
    assert taken(spec=fine)["spec"] == fine
    with pytest.raises(CheckpointError, match="spec"):
        taken(spec=value)


@pytest.mark.parametrize("name", sorted(TABLE.files))
def test_a_file_is_no_device_and_no_pipe(tmp_path, name):
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), "x" * 4000):
        with pytest.raises(CheckpointError, match=name):
            check_kinds({name: path}, "CHECKPOINT")
    for path in (tmp_path, tmp_path / "gone"):
        check_kinds({name: str(path)}, "CHECKPOINT")


# -- unknown names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, True, 0.0, "x", [0], NESTED, math.nan])
def test_an_unknown_argument_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match="--ignore-argument of_another_release"):
        taken(of_another_release=value)
    ignored = ["of_another_release"]
    made = model_arguments(SIZES | {"of_another_release": value}, "CHECKPOINT", ignored)
    assert made == SIZES


@pytest.mark.parametrize("name", [1, None, ("a", "b")])
def test_a_name_may_be_no_text(name):
    for value in (10**5000, NESTED):
        with pytest.raises(CheckpointError):
            model_arguments(SIZES | {name: value, "of_another_release": value}, "CHECKPOINT")


def test_the_epsilon_of_an_older_release_is_taken_under_its_new_name():
    saved = SIZES | {"norm_epsilon": 1e-6}
    found = with_names_of_this_release(saved)
    assert "norm_epsilon" in saved and "norm_epsilon" not in found
    assert model_arguments(found, "CHECKPOINT")["layernorm_epsilon"] == 1e-6
    both = with_names_of_this_release(saved | {"layernorm_epsilon": 1e-5})
    with pytest.raises(CheckpointError, match="norm_epsilon = 1e-06"):
        model_arguments(both, "CHECKPOINT")


def test_a_known_argument_cannot_be_ignored():
    with pytest.raises(CheckpointError, match="window_size"):
        refuse_unknown(SIZES, "CHECKPOINT", ["window_size"])


def test_a_program_without_the_flag_says_what_helps():
    with pytest.raises(CheckpointError, match=r"Write another file$"):
        model_arguments({"of_another_release": 1}, "CHECKPOINT", help="Write another file")


# -- trainings -------------------------------------------------------------------------------------


def test_a_training_checks_kinds_and_no_unknown_names():
    saved = Namespace(**SIZES, of_a_plug_in=NESTED, consumed_train_samples=2**40)
    assert checked_arguments(saved) is saved
    for name, value in (("consumed_train_samples", "1"), ("hidden_size", "64"), ("spec", ["os"])):
        with pytest.raises(CheckpointError, match=name):
            checked_arguments(Namespace(**vars(saved) | {name: value}))


@pytest.mark.parametrize("name", ["hidden_size", "no_rope_freq", "tokenizer_model", "world_size"])
def test_an_error_is_one_short_paragraph(name):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x\n" * 10_000_000, {n: n for n in range(10_000)}):
        with pytest.raises(CheckpointError) as caught:
            check_kinds({name: value}, "CHECKPOINT")
        assert len(str(caught.value)) < 1_000
        assert "\n" not in str(caught.value)


def test_the_patched_trainer_checks_what_it_takes_from_a_checkpoint(monkeypatch):
    """--use-checkpoint-args: before a value becomes one of the run's own."""
    from megatron.training import checkpointing

    saved = Namespace(**SIZES | {"hidden_size": "64"})
    state = {"args": saved, "iteration": 1}
    monkeypatch.setattr(
        checkpointing, "_load_base_checkpoint", lambda *_, **__: (state, "", False, None)
    )
    args = ArgumentParser().parse_args([])
    args.load = "CHECKPOINT"
    with pytest.raises(CheckpointError, match="hidden_size"):
        checkpointing.load_args_from_checkpoint(args)
    assert vars(args).keys() <= {"load", "iteration"}
