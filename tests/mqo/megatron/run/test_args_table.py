"""The table of a checkpoint's arguments."""

import tomllib
from itertools import chain

import pytest
from mqo.megatron.run.args_table import TABLE, is_empty, read_table, unknown_arguments

ROWS = tomllib.loads(TABLE.read_text(encoding="utf-8"))


def test_a_name_is_listed_once():
    texts = [ROWS["expressed"], ROWS["refused"], *ROWS["no_effect"].values()]
    listed = [*" ".join(texts).split(), *set(chain(*ROWS["values"].values()))]
    assert sorted(listed) == sorted(read_table().names)


@pytest.mark.parametrize("mark", ["read", "unsupported", "needed", "files"])
def test_what_is_marked_is_listed(mark):
    marked = ROWS[mark].split()
    assert len(marked) == len(set(marked)) and set(marked) <= read_table().names


def test_ranges_and_groups_are_of_what_is_listed():
    assert read_table().ranges.keys() <= read_table().names
    assert set(ROWS["taken"]) <= ROWS["no_effect"].keys()


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
