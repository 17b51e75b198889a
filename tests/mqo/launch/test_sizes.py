"""Sizes of layers that a custom quantizer does not accept are refused before a run starts."""

import pytest
from mqo.errors import RunError
from mqo.launch.config import Cluster, resolve
from mqo.launch.effects import resolved_config
from mqo.launch.products import Product
from mqo.launch.sizes import check_sizes, needs_sizes
from mqo.recipes import recipe as recipes

COLUMN = "decoder.layers.0.mlp.linear_fc1"
ROW = "decoder.layers.0.mlp.linear_fc2"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2"
SIDES = {COLUMN: "column", ROW: "row", EXPERT: "row"}


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from mqo.quant import quantizer\n"
        '@quantizer("mine", multiple=96)\ndef mine(x, context):\n    return x\n'
    )
    return path


def checked(config, *products):
    resolved = resolved_config(config, config.quantization.types)
    assert needs_sizes(resolved)
    check_sizes(config, resolved, products, SIDES)


def product(layer, gemm, k):
    return Product(layer, gemm, "mine", 1, 8, 8, k, 1, 128 * k)


def of_recipe(name):
    read = recipes.read(name)
    return resolve("llama32-1b", "wikipedia", "bf16", "tiny", recipe=read)


def run(mine, *flags, mode="linear_mine", gemms="all"):
    return resolve(
        *("llama32-1b", "wikipedia", mode, "tiny"),
        plugins=[mine],
        gemms=gemms,
        extra_flags=flags,
        cluster=Cluster(nproc_per_node=4),
    )


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_size_is_a_multiple_of_what_the_quantizer_declares(mine, gemm):
    checked(run(mine), product(ROW, gemm, 192))
    with pytest.raises(RunError, match=rf"{ROW}: its \w+ at {gemm} has 100 .* multiple of 96"):
        checked(run(mine), product(ROW, gemm, 100))


def test_a_size_is_that_of_a_tensor_parallel_rank(mine):
    split = run(mine, "--tensor-model-parallel-size", "2")
    whole = [product(COLUMN, "fprop", 96), product(ROW, "dgrad", 96), product(ROW, "wgrad", 96)]
    checked(split, *whole)
    for halved in (product(ROW, "fprop", 96), product(COLUMN, "dgrad", 96)):
        with pytest.raises(RunError, match=r"48 elements per row \(96 on 2 ranks\)"):
            checked(split, halved)


def test_an_expert_has_a_tensor_parallel_size_of_its_own(mine):
    sizes = ("--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
    checked(run(mine, *sizes), product(EXPERT, "fprop", 96))
    with pytest.raises(RunError, match="48 elements"):
        checked(run(mine, *sizes[:2]), product(EXPERT, "fprop", 96))


def test_the_tokens_of_a_step_are_split_by_context_parallelism_only(mine):
    with pytest.raises(RunError, match=r"\(192 on 4 ranks\).*--context-parallel-size"):
        checked(run(mine, "--context-parallel-size", "4"), product(ROW, "wgrad", 192))


def test_the_tokens_of_an_expert_are_not_a_multiple(mine):
    with pytest.raises(RunError, match="tokens, and mine needs a multiple of 96"):
        checked(run(mine), product(EXPERT, "wgrad", 96))


def test_only_quantized_layers_count(mine):
    checked(run(mine, gemms="fprop"), product(ROW, "dgrad", 100), product(ROW, "matmul", 100))


def test_an_estimator_needs_multiples_of_its_transform():
    config = of_recipe("quest")
    checked(config, product(ROW, "fprop", 256), product(ROW, "dgrad", 100))
    with pytest.raises(RunError, match=r"recipe quest .* 160 .* after a transform of 128"):
        checked(config, product(ROW, "fprop", 160))


def test_other_quantizers_accept_all_sizes():
    config = of_recipe("averis")
    assert not needs_sizes(resolved_config(config, config.quantization.types))
