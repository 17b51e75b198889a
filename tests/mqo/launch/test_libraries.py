"""What Transformer Engine and ModelOpt quantize is part of what a run is called and reports."""

import json

import pytest
from mqo.errors import CheckpointError, MqoError, RunError
from mqo.launch import coverage, libraries
from mqo.launch.config import Quantization, RunConfig, resolve
from mqo.launch.libraries import UNNAMED, LibraryQuantization, modelopt_quantization
from mqo.launch.products import AT_NONE, Coverage, Product
from mqo.launch.run import Result
from mqo.matrix.tables import LINEAR_SITES, UNQUANTIZED
from mqo.megatron.run.files import MODELOPT_STATE
from mqo.runs import RunFolder

ENGINE = ("--transformer-impl", "transformer_engine")
HYBRID = (*ENGINE, "--fp8-format", "hybrid")
INT8 = (("*", False), ("*weight_quantizer", True), ("*input_quantizer", True), ("*head*", False))


def cell(*flags, mode="bf16", **rest):
    return resolve("llama32-1b", "wikipedia", mode, "tiny", extra_flags=flags, **rest)


# -- Transformer Engine ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (HYBRID, "fp8 hybrid by Transformer Engine"),
        ((*HYBRID, "--fp8-recipe", "mxfp8"), "fp8 hybrid mxfp8 by Transformer Engine"),
        ((*ENGINE, "--fp8-format=e4m3"), "fp8 e4m3 by Transformer Engine"),
        (
            (*ENGINE, "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
            "fp4 e2m1 nvfp4 by Transformer Engine",
        ),
        (
            (*ENGINE, "--te-precision-config-file", "/x/layers.yaml"),
            "layers as in layers.yaml by Transformer Engine",
        ),
    ],
)
def test_a_recipe_of_transformer_engine_is_part_of_the_name(flags, name):
    made = cell(*flags)
    assert made.mode_label == made.quantization.name == name
    assert made.quantization.name != UNQUANTIZED
    assert name.split()[-1] in made.title
    assert cell(*flags, mode="FA_mxfp8").mode_label == f"FA_mxfp8, {name}"


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ENGINE,
        ("--fp8-format", "hybrid"),  # with local layers it has no effect
        (
            *(*HYBRID, "--fp8-recipe", "custom"),
            *("--fp8-quantizer-factory", "mqo.megatron.transformer_engine.factory.quantizer"),
        ),
    ],
)
def test_without_a_recipe_of_its_own_nothing_is_named(flags):
    assert cell(*flags).mode_label == "bf16 (unquantized)"
    assert cell(*flags).quantization.libraries == ()


def test_quantizers_of_the_mode_are_no_library():
    """TE asks for them in any fp8 format; the run's own recipe replaces them."""
    assert cell(*HYBRID, mode="linear_mxfp8").mode_label == "linear_mxfp8"
    replaced = cell(*HYBRID, "--fp8-recipe", "mxfp8", mode="linear_mxfp8")
    assert replaced.mode_label == "linear_mxfp8, fp8 hybrid mxfp8 by Transformer Engine"


@pytest.mark.parametrize(
    ("flags", "plain"),
    [
        ((), ["output_layer"]),
        (("--fp8-output-proj",), []),
        (("--first-last-layers-bf16",), ["0", "3", "output_layer"]),
        (
            ("--first-last-layers-bf16", "--num-layers-at-end-in-bf16=2"),
            ["0", "2", "3", "output_layer"],
        ),
    ],
)
def test_the_layers_that_a_recipe_leaves_out(flags, plain):
    (library,) = cell(*HYBRID, "--num-layers", "4", *flags).quantization.libraries
    layers = {str(n): f"decoder.layers.{n}.mlp.linear_fc1" for n in range(4)}
    layers["output_layer"] = "output_layer"
    for gemm in LINEAR_SITES["all"]:
        left = [name for name, layer in layers.items() if library.plain_operands(layer, gemm)]
        assert left == plain


# -- ModelOpt --------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that makes checkpoints of which some have a state, and notes what is described."""
    asked = []

    def describe(tree, folder):
        asked.append(str(folder))
        return {"modelopt": {"format": "int8", "rules": INT8}}

    monkeypatch.setattr(libraries, "describe", describe)

    def make(name, *iterations, states=()):
        for iteration in iterations:
            folder = tmp_path / name / f"iter_{iteration:07d}"
            folder.mkdir(parents=True)
            if iteration in states:
                (folder / MODELOPT_STATE).mkdir()
        (tmp_path / name / libraries.TRACKER).write_text(str(iterations[-1]))
        return tmp_path / name

    make.asked = asked
    return make


def test_the_checkpoint_that_is_loaded_counts(saved, tmp_path):
    quantized, plain = saved("q", 1, 2, states=(2,)), saved("p", 3)
    pretrained = ("--pretrained-checkpoint", str(quantized))
    for own, flags, found in [
        (None, pretrained, True),
        (tmp_path / "new", pretrained, True),  # nothing is saved there yet
        (plain, pretrained, False),  # the run goes on from its own checkpoint
        (quantized, (), True),
        (None, ("--load", str(quantized)), True),
        (None, (f"--load={quantized}", "--ckpt-step=1"), False),
        (None, (), False),
    ]:
        made = modelopt_quantization(tmp_path, own, flags)
        assert bool(made) is found, (own, flags)
        assert not made or (made.label, made.rules) == ("int8 by ModelOpt", INT8)
    assert set(saved.asked) == {str(quantized / "iter_0000002")}


@pytest.mark.parametrize(
    "facts",
    [
        {"format": None, "rules": []},
        None,
        CheckpointError("damaged"),
        RunError("the program ended"),
        {"format": 7, "rules": "x"},
    ],
)
def test_a_state_without_a_known_format(facts, saved, tmp_path, monkeypatch):
    def describe(tree, folder):
        if isinstance(facts, MqoError):
            raise facts
        return {"modelopt": facts}

    monkeypatch.setattr(libraries, "describe", describe)
    made = modelopt_quantization(tmp_path, saved("q", 1, states=(1,)), ())
    expected = LibraryQuantization(library="ModelOpt", format=UNNAMED)
    assert made == (None if facts is None else expected)


# -- where it is told ------------------------------------------------------------------------------

LIBRARY = LibraryQuantization(library="ModelOpt", format="int8", rules=INT8)


def test_the_result_names_it():
    config = cell().with_library(LIBRARY)
    types = dict.fromkeys(config.quantization.types, "none") | config.quantization.library_types
    line = Result("run", 8, 7.0, None, None, 9.0, types).line()
    assert line.endswith("; int8 by ModelOpt")
    none = dict.fromkeys(config.quantization.types, "none")
    assert Result("run", 8, 7.0, None, None, 9.0, none).line().endswith("; nothing quantized")


def test_the_result_names_a_schedule():
    line = Result("r", 8, 7.0, None, None, 9.0, {"qk": "mxfp8"}, ("qk: mxfp8 until 4, then bf16",))
    assert line.line().endswith("; qk=mxfp8, qk: mxfp8 until 4, then bf16")


def test_it_is_written_and_read_and_absent_in_older_runs(tmp_path):
    run, config = RunFolder(tmp_path), cell().with_library(LIBRARY)
    config.write(run)
    assert RunConfig.read(run) == config
    table = json.loads(run.config.read_text())
    del table["quantization"]["libraries"], table["experiment"]["name"]
    run.config.write_text(json.dumps(table))
    assert RunConfig.read(run) == cell()
    assert Quantization(mode="bf16").library_types == {}


def product(layer, gemm, quant_type="none"):
    return Product(layer, gemm, quant_type, 1, 2, 3, 4, 1, 48)


def found(*products):
    return Coverage(1, 8, 100, products, ())


def test_coverage_counts_gemms_with_two_quantized_operands():
    made = found(*(product("a.fc1", gemm) for gemm in LINEAR_SITES["all"])).with_library(LIBRARY)
    assert made.shares == {("fprop", "int8"): pytest.approx(1 / 3)}
    reasons = {one.gemm: one.reason for one in made.products}
    assert reasons["fprop"] == ""
    assert "grad" in reasons["dgrad"] and "grad" in reasons["wgrad"]


def test_coverage_of_weights_alone_is_none():
    rules = (("*", False), ("*weight_quantizer", True))
    library = LibraryQuantization(library="ModelOpt", format="int8_wo", rules=rules)
    made = found(product("a.fc1", "fprop"), product("a.fc1", "wgrad")).with_library(library)
    assert made.share == 0
    assert [one.reason for one in made.products] == ["not quantized: x", AT_NONE]


def test_coverage_keeps_what_the_source_quantizes_and_what_no_library_does():
    kept = (
        product("lm_head", "fprop"),
        product("a", "qk"),
        product("a", "fprop", "mxfp8"),
        product("a", "mm", None),
    )
    assert found(*kept).with_library(LIBRARY).products == kept


def test_coverage_without_rules_is_not_made_up():
    config = cell().with_library(LibraryQuantization(library="ModelOpt", format=UNNAMED))
    with pytest.raises(RunError, match=rf"ModelOpt .*\({UNNAMED}\)"):
        coverage._with_libraries(config, found(product("a", "fprop")))
