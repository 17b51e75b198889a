"""quant.toml as the launcher writes it: its tables, schedules by site, and the valid values."""

import subprocess
import sys
import tomllib

import pytest
from mqo.errors import MqoError, UnknownNameError
from mqo.launch.quantiser import Quantiser, choices, quant_toml, schedules
from mqo.project import Project
from pydantic import ValidationError

TYPES = {"fprop": "mxfp4", "dgrad": "none", "wgrad": "mxfp4", "qk": "mxfp8", "pv": "none"}


def test_only_what_was_chosen_is_written():
    assert tomllib.loads(quant_toml(TYPES)) == {"asked": TYPES}
    chosen = Quantiser(block=64, cache_weights=True, save_activations="packed")
    written = tomllib.loads(quant_toml(TYPES, quantiser=chosen, schedule=["qk: mxfp8"]))
    assert written["quantiser"] == {
        "block": 64,
        "cache_weights": True,
        "save_activations": "packed",
    }
    assert written["schedule"] == {"qk": "mxfp8"}


def test_a_kind_stands_for_its_quantised_sites():
    found = schedules(TYPES, ["linear: mxfp4 until 0.9, then bf16", "attention:mxfp8"])
    assert found == {
        "fprop": "mxfp4 until 0.9, then bf16",
        "wgrad": "mxfp4 until 0.9, then bf16",
        "qk": "mxfp8",
    }


def test_a_site_may_be_named_though_it_begins_unquantised():
    assert schedules(TYPES, ["pv: none until 0.1, then mxfp8"]) == {
        "pv": "none until 0.1, then mxfp8"
    }


def test_what_names_no_site_is_refused():
    with pytest.raises(UnknownNameError, match=r"'mlp'.*attention, dgrad, fprop, linear"):
        schedules(TYPES, ["mlp: mxfp8"])
    with pytest.raises(MqoError, match=r"for no site.*one of qk, pv"):
        schedules({"qk": "none", "pv": "none"}, ["attention: mxfp8"])
    with pytest.raises(MqoError, match="two schedules for fprop"):
        schedules(TYPES, ["fprop: mxfp8", "linear: mxfp8"])


def test_an_unknown_value_is_refused():
    with pytest.raises(ValidationError, match="16, 32, 64 or 128"):
        Quantiser(block=48)


def test_the_valid_values_and_keys_are_the_quantisers_own():
    code = (
        "from megatron.quant import BLOCK_SIZES, OVERFLOWS, ROUNDINGS, SCALE_RULES;"
        "from megatron.quant.config import _CHECKS; from megatron.quant.formats import SAVED_FORMS;"
        "print([BLOCK_SIZES, SCALE_RULES, ROUNDINGS, OVERFLOWS, SAVED_FORMS],"
        " sorted(_CHECKS['quantiser']), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Project.here().tree, capture_output=True, text=True
    )
    options = ("block", "scale_rule", "rounding", "overflow", "save_activations")
    assert done.stdout.splitlines() == [
        str([choices(option) for option in options]),
        str(sorted(Quantiser.model_fields)),
    ]
