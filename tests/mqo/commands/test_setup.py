"""`mqo setup` prepares the tree, and only the samples that are named."""

import pytest
from mqo.data import prepare as preparing
from mqo.data.prepare import PreparedData
from mqo.launch import prepare as launch


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """The samples that were prepared."""
    names = []

    def prepare(project, name, report):
        names.append(name)
        return PreparedData(name, tmp_path, tmp_path, tmp_path, 3, 2, 1)

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(launch, "ready_tree", lambda *given, **rest: None)
    return names


def test_no_sample_is_prepared_unless_it_is_named(prepared, command_line):
    assert command_line("setup")[0] == 0
    assert prepared == []
    assert command_line("setup", "--dataset", "dolma")[0] == 0
    assert prepared == ["dolma"]


def test_an_unknown_sample_is_refused_before_anything(prepared, command_line):
    code, _, err = command_line("setup", "--dataset", "dolma", "--dataset", "c4")
    assert code == 2
    assert "'c4'" in err and "wikipedia" in err
    assert prepared == []
