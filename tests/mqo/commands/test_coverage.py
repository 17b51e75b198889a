"""`mqo coverage` of modes and recipes with custom quantizers."""

import json

import pytest
from mqo.launch import coverage
from mqo.launch.products import Coverage, Product

FILE = '@quantizer("mine", options={"bits": 3})\ndef mine(x, context):\n    return x\n'
MODEL = ("coverage", "--model", "llama32-1b", "--training-config", "smoke")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    (tmp_path / "own.toml").write_text('types = { wgrad = "mine" }\nplugins = ["mine.py"]\n')
    return path


@pytest.fixture
def planned(monkeypatch):
    """The configurations of which a coverage is asked for."""
    configs = []

    def of_config(project, tree, series, config):
        configs.append(config)
        return Coverage(1, 8, 9, (Product("up", "fprop", "mine", 1, 2, 3, 4, 1, 48),), ())

    monkeypatch.setattr(coverage, "of_config", of_config)
    return configs


def test_a_mode_may_name_a_quantizer_of_a_file(command_line, planned, file):
    words = ("--mode", "linear_mine", "--plugin", file, "--plugin-option", "mine.bits=4")
    code, out, _ = command_line(*MODEL, *words)
    assert code == 0
    (plugin,) = planned[0].quantization.plugins
    assert (plugin.name, plugin.options) == ("mine", {"bits": 4})
    assert out.startswith(f"llama32-1b, linear_mine {plugin.label}, ")


def test_a_recipe_may_name_its_file(command_line, planned, file):
    words = ("--recipe", file.with_name("own.toml"), "--plugin-option", "mine.bits=4")
    assert command_line(*MODEL, *words)[0] == 0
    assert [plugin.options for plugin in planned[0].quantization.plugins] == [{"bits": 4}]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--mode", "linear_mine"), "'linear_mine'"),
        (("--mode", "bf16", "--plugin", "{file}"), "changes nothing"),
        (("--mode", "source", "--plugin", "{file}"), "changes nothing"),
        (("--mode", "mine", "--plugin", "{file}", "--plugin-option", "mine.bit=4"), "'bit'"),
        (("--mode", "mine", "--plugin", "{file}", "--plugin-option", "bits=4"), "'bits=4'"),
        (("--mode", "mine", "--plugin", "{file}.gone"), "gone"),
        (("--mode", "bf16", "--plugin-option", "mine.bits=4"), "--plugin FILE"),
    ],
)
def test_what_changes_nothing_is_refused(command_line, planned, file, words, text):
    code, out, err = command_line(*MODEL, *(word.format(file=file) for word in words))
    assert (code, out, planned) == (2, "", [])
    assert text in err


def test_options_of_a_training_and_megatrons_flags_count(command_line, planned, monkeypatch):
    layers = {"fprop": ["up"]}
    monkeypatch.setattr(Coverage, "layers_by_site", lambda self: layers)
    words = [
        "--mode",
        "linear_mxfp8",
        "--block",
        "16",
        "--include",
        "u*",
        "--",
        "--num-layers",
        "4",
    ]
    assert command_line(*MODEL, *words)[0] == 2  # the pattern changes nothing: there is one layer
    layers["fprop"].append("down")
    assert command_line(*MODEL, *words)[0] == 0
    config = planned[-1]
    assert config.quantization.options == {"block": 16, "include": ["u*"]}
    assert config.experiment.extra_flags == ("--num-layers", "4")
    assert command_line(*MODEL, "--mode", "bf16", "--nonsense")[0] == 2


@pytest.mark.parametrize(
    "words", [("--megatron", "x"), ("--runs", "x"), ("--dry-run",), ("x",), ("--tracker", "mlflow")]
)
def test_an_option_that_a_coverage_does_not_depend_on_is_refused(command_line, planned, words):
    code, out, err = command_line(*MODEL, "--mode", "bf16", *words)
    assert (code, out, planned) == (2, "", [])
    assert "no effect" in err


@pytest.mark.slow
def test_the_model_is_measured_without_running_the_file(command_line, vendored, file):
    file.write_text(FILE + "raise SystemExit('this file is not to be run')\n")
    words = ("--mode", "FA_linear_mine", "--plugin", file, "--json")
    code, out, err = command_line(*MODEL, *words)
    assert (code, err) == (0, "")
    products = json.loads(out)["products"]
    kinds = {(row["gemm"], row["quant_type"]) for row in products if not row["reason"]}
    assert kinds == {("fprop", "mine"), ("qk", "mine")}
