from mqo.launch.command import as_shell, flag_values, from_shell, without_flag


def test_a_command_is_read_back_from_its_shell_text():
    command = ["python", "-m", "a b", "--flag", "it's", "--other", "$HOME", "--empty", ""]
    env = {"A": "1", "B_2": "with = and space"}
    text = f"#!/usr/bin/env bash\n{as_shell(command, env)}\n"
    assert from_shell(text) == (command, env)


def test_flags_and_their_values_can_be_taken_out():
    command = ["p", "--load", "x", "--seed", "1", "--load", "y"]
    assert without_flag(command, "--load") == ["p", "--seed", "1"]
    assert flag_values(command, "--load") == ["y"]
    assert flag_values(command, "--save") == []
