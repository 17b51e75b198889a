"""The table of a checkpoint's arguments."""

import tomllib

import pytest
from mqo.megatron.run.args_table import TABLE, is_empty, parse_table, read_table, unknown_arguments

ROWS = tomllib.loads(TABLE.read_text(encoding="utf-8"))


def test_a_name_is_listed_once():
    assert parse_table(ROWS) == read_table()
    for change in (
        {"refused": "spec spec"},
        {"refused": ROWS["refused"] + " hidden_size"},
        {"refused": ROWS["refused"] + " lr"},
    ):
        with pytest.raises(ValueError, match=r"twice|two groups"):
            parse_table(ROWS | change)


@pytest.mark.parametrize("mark", ["read", "unsupported", "needed", "files"])
def test_what_is_marked_is_listed(mark):
    with pytest.raises(ValueError, match="no_such_argument"):
        parse_table(ROWS | {mark: ROWS[mark] + " no_such_argument"})
    with pytest.raises(ValueError, match="not in any group"):
        parse_table(ROWS | {"taken": ["no_such_group"]})


def test_a_range_has_numbers_in_it():
    for name, (least, most) in read_table().ranges.items():
        assert least < most, name


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_argument_may_be_empty(value):
    assert is_empty(value)
    assert unknown_arguments({"of_another_release": value}) == []


@pytest.mark.parametrize("value", [True, 0, 0.0, 1, "x", [0], {"a": 1}, (), object()])
def test_an_unknown_argument_with_a_value_is_found(value):
    assert unknown_arguments({"of_another_release": value, "lr": value}) == ["of_another_release"]


def test_the_user_may_ignore_unknown_arguments_only():
    saved = {"first": 1, "second": 2}
    assert unknown_arguments(saved, ["first", "absent"]) == ["second"]
    with pytest.raises(ValueError, match="window_size"):
        unknown_arguments(saved, ["window_size"])
