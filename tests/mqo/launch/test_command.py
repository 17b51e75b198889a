import pytest
from mqo.errors import LayoutError
from mqo.launch.command import as_shell, flag_words, from_shell, read_flags, without_flag


def test_a_command_is_read_back_from_its_shell_text():
    command = ["python", "-m", "a b", "--flag", "it's", "--other", "$HOME", "--empty", ""]
    env = {"A": "1", "B_2": "with = and space"}
    text = f"#!/usr/bin/env bash\n{as_shell(command, env)}\n"
    assert from_shell(text) == (command, env)


def test_flags_and_their_values_can_be_taken_out():
    command = ["p", "--load", "x", "--seed", "1", "--load", "y"]
    assert without_flag(command, "--load") == ["p", "--seed", "1"]
    assert flag_words(command) == {"--load": ["y"], "--seed": ["1"]}
    assert flag_words([*command, "--load=z"])["--load"] == ["z"]


def test_flags_of_upstream_are_read_by_their_types_and_defaults():
    flags = ["--size", "2", "--other", "x", "--size=3", "--switch"]
    wanted = {"size": 1, "share": 0.5, "switch": False, "off": False, "name": str}
    found = read_flags(flags, wanted)
    assert vars(found) == {"size": 3, "share": 0.5, "switch": True, "off": False, "name": None}


@pytest.mark.parametrize("flags", [["--size", "many"], ["--size"]])
def test_a_size_that_is_no_number_is_refused(flags):
    with pytest.raises(LayoutError, match="--size"):
        read_flags(flags, {"size": int})
