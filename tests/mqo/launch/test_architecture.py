"""Which flags of the user's make another model: all that the published models have, and more."""

import json
import sys

import pytest
from mqo.launch import architecture
from mqo.launch.architecture import architecture_changes, architecture_flags
from mqo.launch.command import flag_table
from mqo.matrix import tables

from ... import forking

MODELS = tables.models()
SWITCHES = ["--swiglu", "--disable-bias-linear", "--multi-latent-attention", "--qk-layernorm"]


@pytest.mark.parametrize("name", MODELS)
def test_the_published_flags_change_nothing(name):
    assert architecture_changes(MODELS[name], architecture_flags(MODELS[name], 4096)) == {}


@pytest.mark.parametrize("name", MODELS)
def test_another_value_of_any_published_flag_is_a_change(name):
    published = flag_table(architecture_flags(MODELS[name], 4096))
    for flag, value in published.items():
        expected = {} if flag in architecture._OF_TRAINING or not value else {flag: "7"}
        assert architecture_changes(MODELS[name], [flag, "7"] if value else [flag]) == expected


def test_the_flags_of_another_model_are_changes():
    mixed = architecture_flags(MODELS["deepseek2_lite"], 4096)
    found = architecture_changes(MODELS["llama32-1b"], mixed)
    assert {"--multi-latent-attention", "--qk-layernorm", "--num-experts"} < set(found)
    assert "--untie-embeddings-and-output-weights" in found


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--hidden-size=2048"], False),
        (["--hidden-size=512"], True),
        (["--hidden-size", "512", "--hidden-size", "2048"], False),  # the last mention counts
        (["--norm-epsilon", "0.00001"], False),
        (["--norm-epsilon", "1e-6"], True),
        (["--softmax-type", "vanilla"], False),
        (["--softmax-type", "off-by-one"], True),
        (["--rotary-percent", "1.0"], False),
        (["--window-size", "-1,0"], True),
        (["--qk-layernorm"], True),
        (["--hybrid-layer-pattern", "M*M*"], True),
        (["--seq-length", "64", "--hidden-dropout", "0.1", "--seed", "1", "--lr", "1e-3"], False),
    ],
)
def test_what_counts_as_a_change(words, changed):
    assert bool(architecture_changes(MODELS["llama32-1b"], words)) is changed


LIST = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
import preflight
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
json.dump([name for action in parser._actions for name in action.option_strings], sys.stdout)
"""


def test_every_flag_of_the_tables_is_one_of_megatrons(vendored):
    """A name that Megatron does not know would never be found in a command."""
    done = forking.run([sys.executable, "-W", "ignore", "-c", LIST, vendored.root])
    assert done.returncode == 0, done.stderr[-2000:]
    known = json.loads(done.stdout.splitlines()[-1])
    assert len(known) > 500
    assert sorted(architecture._known() - set(known)) == []
