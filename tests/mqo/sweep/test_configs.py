from pathlib import Path

import pytest
from mqo.errors import DataError, MqoError, UnknownNameError
from mqo.launch.variants import GemmChoice
from mqo.sweep import configs


def jobs(models="llama32-1b", datasets="wikipedia", modes="bf16", training="tiny", **rest):
    return configs.jobs(models, datasets, modes, training, **rest)


def test_all_by_all_by_the_modes_of_the_scripts_are_sixty():
    made = jobs("all", "all", None)
    assert len({job.name for job in made}) == len({job.digest for job in made}) == 60
    assert {job.config.experiment.training.name for job in made} == {"tiny"}


def test_each_seed_is_a_run_with_the_flag_last():
    made = jobs(seeds=(1, 2, 1), extra_flags=("--lr", "1"))
    assert [job.name.rpartition("_")[2] for job in made] == ["seed1", "seed2"]
    assert [job.config.experiment.extra_flags for job in made] == [
        ("--lr", "1", "--seed", "1"),
        ("--lr", "1", "--seed", "2"),
    ]


def test_a_table_says_that_bf16_is_a_mode_where_the_dtype_is_another():
    labels = [job.label.removeprefix("llama32-1b_wikipedia_") for job in jobs(modes="bf16,mxfp8")]
    assert labels == ["bf16 (unquantized)", "mxfp8"]
    assert jobs(seeds=(1,))[0].label.endswith("_bf16_seed1 (unquantized)")
    assert jobs(dtype="bf16")[0].label.endswith("_bf16")
    assert jobs(schedule=("fprop: mxfp8 after 9",))[0].label.endswith("_bf16")


def test_a_sweep_of_own_data_is_named_after_them():
    own = {"tokenizer": Path("/d/tok"), "data_prefix": Path("/d/web_text_document")}
    assert [job.name for job in jobs(datasets=None, **own)] == ["llama32-1b_web_bf16"]
    assert [job.name for job in jobs(datasets="mine", **own)] == ["llama32-1b_mine_bf16"]
    with pytest.raises(UnknownNameError, match="mine"):
        jobs(datasets="mine")
    with pytest.raises(MqoError, match=r"--data-prefix .*--dataset"):
        configs.check(jobs(datasets="mine,wikipedia", **own))
    with pytest.raises(MqoError, match=r"--data-prefix .*--dataset"):
        configs.check(jobs(datasets="all", **own))


def test_a_changed_model_has_another_name_in_a_sweep():
    (job,) = jobs(extra_flags=("--num-layers", "3"))
    assert job.name == "llama32-1b-changed_wikipedia_bf16"


def test_neighbors_write_the_index_of_different_datasets():
    first, second, third, _ = jobs(datasets="all", modes="bf16,FA_mxfp8")
    assert first.data_key != second.data_key
    assert first.data_key == third.data_key


def test_all_bad_runs_are_named_before_any_is_started():
    good, bad = jobs(), jobs("llama*", extra_flags=("--seq-length", "65"))
    configs.check(good)
    with pytest.raises(MqoError, match="2 of 3 runs") as error:
        configs.check([*good, *bad])
    named = [line.partition(": ")[0] for line in error.value.detail.splitlines()]
    assert named == [job.name for job in bad]
    assert error.value.detail.count("65 tokens") == 2


def test_what_ails_all_runs_is_said_once():
    with pytest.raises(DataError, match=r"data .*for wikipedia;") as error:
        configs.check(jobs(modes="bf16,mxfp8", training="fast"))
    assert not error.value.detail


def names(made):
    return [job.name.removeprefix("llama32-1b_wikipedia_") for job in made]


def test_an_axis_is_of_modes_that_quantize():
    axes = ("rounding=nearest-even,stochastic", "block=16,32")
    made = jobs(modes="bf16,linear_mxfp4", axes=axes)
    assert names(made) == [
        "bf16",
        "linear_mxfp4_rounding-nearest-even_block-16",
        "linear_mxfp4_rounding-nearest-even_block-32",
        "linear_mxfp4_rounding-stochastic_block-16",
        "linear_mxfp4_rounding-stochastic_block-32",
    ]
    options = [job.config.quantization.options for job in made]
    assert options[0] == {}
    assert options[3] == {"rounding": "stochastic", "block": 16}
    assert len({job.digest for job in made}) == 5


def test_recipes_come_behind_modes_and_beside_bf16_alone():
    assert names(jobs(modes=None, recipes="nvfp4, hif4")) == ["bf16", "nvfp4-recipe", "hif4-recipe"]
    made = jobs(
        modes="bf16,linear_mxfp4", recipes="mxfp8", axes=("block=16",), gemms=GemmChoice("all")
    )
    assert names(made) == ["bf16", "linear_mxfp4_block-16", "mxfp8-recipe"]
    assert made[2].config.quantization.recipe.name == "mxfp8"
    assert made[2].config.quantization.types["dgrad"] == "mxfp8"
    assert made[2].label.endswith("_mxfp8-recipe")


def test_runs_that_differ_only_by_products_of_attention_have_other_digests():
    modes, choice = "bf16,linear_mxfp8,qk_mxfp8", GemmChoice(attention="all")
    plain, chosen = jobs(modes=modes), jobs(modes=modes, gemms=choice)
    assert names(plain) == names(chosen)
    same = [one.digest == other.digest for one, other in zip(plain, chosen, strict=True)]
    assert same == [True, True, False]
    quantization = chosen[2].config.quantization
    assert quantization.attention_gemms == "all"
    assert quantization.types["dq"] == "mxfp8"


def test_an_axis_and_a_pattern_may_be_of_attentions_backward_pass():
    choice = GemmChoice(attention="all")
    made = jobs(modes="pv_mxfp8", axes=("exclude=none,dv:*",), gemms=choice)
    assert names(made) == ["pv_mxfp8_exclude-none", "pv_mxfp8_exclude-dv-"]
    (kept,) = jobs(modes="pv_mxfp8", gemms=choice, exclude=("dv:*",))
    assert kept.config.quantization.options == {"exclude": ["dv:*"]}
    with pytest.raises(MqoError, match=r"dv:\*"):
        jobs(modes="pv_mxfp8", exclude=("dv:*",))


def test_a_value_that_the_option_does_not_have_is_refused():
    with pytest.raises(MqoError, match=r"rounding.*up"):
        jobs(modes="linear_mxfp4", axes=("rounding=up",))
