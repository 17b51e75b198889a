"""Flags of Megatron's that would be taken and ignored are refused by name."""

import pytest
from megatron.training.arguments import add_megatron_arguments
from mqo.launch.upstream_flags import HYBRID, PRECISION, FlagError, check_flags

ENGINE = ("--transformer-impl", "transformer_engine")
# Flags whose names have a dtype or 'quant' in them and that local layers, or no layer, read.
READ = {
    *("--bf16", "--grad-reduce-in-bf16", "--no-create-attention-mask-in-dataloader"),
    *("--disable-bf16-reduced-precision-matmul", "--bf16-reduced-precision-matmul"),
    # Of checkpoints and of inference.
    *("--stream-ckpt-dequant", "--no-stream-ckpt-dequant", "--disable-stream-ckpt-dequant"),
    *("--inference-moe-disable-fused-quant-kernels", "--moe-router-quantile-balancing-ema"),
}


def upstream_flags():
    import argparse

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return [flag for action in parser._actions for flag in action.option_strings]


def test_each_precision_flag_of_the_parser_is_reviewed():
    words = ("fp8", "fp4", "bf16", "kitchen", "te-precision", "quant")
    named = {flag for flag in upstream_flags() if any(word in flag for word in words)}
    assert named
    unknown = {f for f in named - READ if not PRECISION.fullmatch(f)}
    assert unknown == set()


def test_each_flag_of_hybrid_models_is_reviewed():
    begins = ("--hybrid-", "--mtp-hybrid-", "--is-hybrid-", "--mamba-")
    named = {f for f in upstream_flags() if f.startswith(begins)} - {"--hybrid-context-parallel"}
    assert "--hybrid-layer-pattern" in named
    assert {f for f in named if not HYBRID.fullmatch(f)} == set()


@pytest.mark.parametrize("flag", [f for f in upstream_flags() if PRECISION.fullmatch(f)])
def test_local_layers_take_no_precision_flag(flag):
    for words in ((flag, "1"), (f"{flag}=1",)):
        with pytest.raises(FlagError, match=flag):
            check_flags(words)


@pytest.mark.parametrize("flag", [f for f in upstream_flags() if HYBRID.fullmatch(f)])
def test_no_hybrid_model_is_trained_under_the_name_of_a_gpt(flag):
    with pytest.raises(FlagError, match=flag):
        check_flags((flag, "M*"))


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (("--fp8-margin", "1"), "--fp8-format"),
        (("--fp4-recipe", "nvfp4"), "--fp4-format"),
        (("--first-last-layers-bf16",), "--fp8-format or --fp4-format"),
        (
            ("--fp8-format", "hybrid", "--num-layers-at-start-in-bf16", "2"),
            "--first-last-layers-bf16",
        ),
    ],
)
def test_a_flag_needs_the_one_that_it_belongs_to(flags, needed):
    with pytest.raises(FlagError, match=needed):
        check_flags((*ENGINE, *flags))


def test_the_engines_layers_take_them():
    check_flags((*ENGINE, "--fp8-format", "hybrid", "--fp8-margin", "1"))
    check_flags((*ENGINE, "--fp8-margin", "1"), added=("--fp8-format", "e4m3"))
    check_flags(("--lr", "1e-3", "--num-layers", "2"))
