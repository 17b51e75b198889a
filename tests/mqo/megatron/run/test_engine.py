"""What of a run's arguments would leave the layers of Transformer Engine unquantized."""

from argparse import Namespace

import pytest
from mqo.megatron.run import engine
from mqo.megatron.transformer_engine import releases

SOUND = {
    **{"fp8": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": releases.FACTORY},
    **{"gradient_accumulation_fusion": False, "add_bias_linear": False, "num_experts": None},
}
NEW, OLD = "2.20.2", "2.11.0"


@pytest.fixture
def faults(monkeypatch, run):
    """A function that returns the faults of arguments for a release; `text` is of quant.toml."""

    def found(version=NEW, text="", **changed):
        monkeypatch.setattr(releases, "installed", lambda: version)
        run(rest=text)
        return engine.faults(Namespace(**SOUND | changed))

    return found


@pytest.mark.parametrize("version", [NEW, OLD])
def test_a_sound_run_has_none(faults, version):
    assert faults(version) == ()


@pytest.mark.parametrize("version", ["2.9.0", "2.99.0", None])
def test_an_unknown_release_is_the_one_fault(faults, version):
    (text,) = faults(version, fp8=None)
    assert "2.10 to 2.20" in text and "--transformer-impl local" in text


@pytest.mark.parametrize(
    "changed",
    [{"fp8": None}, {"fp8_recipe": "mxfp8"}, {"fp8_quantizer_factory": "another.factory"}],
)
def test_the_factory_must_be_asked(faults, changed):
    (text,) = faults(**changed)
    assert " ".join(releases.FLAGS) in text


@pytest.mark.parametrize("name", ["fp8_param_gather", "first_last_layers_bf16"])
def test_what_takes_layers_from_the_factory_is_named(faults, name):
    (text,) = faults(**{name: True})
    assert text.startswith(f"--{name.replace('_', '-')}: ")


def test_activations_cannot_be_saved_as_codes(faults):
    (text,) = faults(text='[quantizer]\nsave_activations = "packed"\n')
    assert text.startswith("--save-activations packed: ")


@pytest.mark.parametrize("kept", ["true", "false"])
def test_weights_that_draw_are_kept_for_a_step(faults, kept):
    found = faults(text=f'[quantizer]\nrounding = "stochastic"\ncache_weights = {kept}\n')
    assert any("pass --cache-weights" in text for text in found) == (kept == "false")


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"gradient_accumulation_fusion": True}, "--no-gradient-accumulation-fusion"),
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        ({"num_experts": 8, "moe_grouped_gemm": True}, "--moe-grouped-gemm"),
    ],
)
def test_what_an_older_release_would_leave_out_is_a_fault_there_alone(faults, changed, flag):
    assert faults(NEW, **changed) == ()
    (text,) = faults(OLD, **changed)
    assert OLD in text and flag in text
