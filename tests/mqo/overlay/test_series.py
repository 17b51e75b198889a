import pytest
from mqo.errors import UnknownNameError
from mqo.overlay.codemod import Codemod
from mqo.overlay.edits import FileEdits
from mqo.overlay.series import Series, added_files
from mqo.project import Project


@pytest.fixture
def series(mini):
    return mini.series


def test_entries_come_in_the_order_of_the_file(series):
    assert [entry.name for entry in series.entries] == ["ours", "quant_sites", "new_engine"]


def test_an_entry_is_found_by_name(series):
    assert series["new_engine"].kind == "codemod"


def test_an_unknown_name_lists_the_valid_ones(series):
    with pytest.raises(UnknownNameError, match=r"'typo'.*new_engine, ours, quant_sites"):
        series["typo"]


def test_a_series_without_an_entry_keeps_the_others_in_order(series):
    rest = series.without("quant_sites")
    assert [entry.name for entry in rest.entries] == ["ours", "new_engine"]


def test_what_requires_an_entry_is_left_out_with_it(series):
    assert [entry.name for entry in series.without("ours").entries] == ["new_engine"]


def test_leaving_out_an_unknown_entry_is_an_error(series):
    with pytest.raises(UnknownNameError):
        series.without("quant_sites", "typo")


@pytest.mark.parametrize(("version", "held"), [("0.9", False), ("1.9.9", True), ("2.0", False)])
def test_an_entry_holds_in_the_releases_of_its_range(series, version, held):
    assert series["quant_sites"].applies_to(version) is held


@pytest.mark.parametrize(("version", "held"), [("0.9", False), ("1.9.9", True), ("2.0", False)])
def test_a_series_supports_the_releases_of_its_range(series, version, held):
    assert series.supports(version) is held
    assert series.without("new_engine").supports(version) is held


def test_every_entry_of_the_repository_loads_and_says_why():
    for entry in Series.load(Project.here().patches).entries:
        assert entry.reason.endswith(".")
        if entry.kind == "site":
            assert all(isinstance(file, FileEdits) for file in entry.load_edits())
        elif entry.kind == "codemod":
            assert isinstance(entry.load_codemod(), Codemod)
        else:
            assert added_files(entry, Project.here().tree)
