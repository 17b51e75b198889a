"""`mqo setup` prepares the tree, and only the samples that are named."""

import pytest
from mqo.data import prepare as preparing
from mqo.data.cached import Contents
from mqo.launch import prepare as launch


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """The samples that were prepared."""
    names = []

    def prepare(project, name, report):
        names.append(name)
        return tmp_path, Contents(documents=2, tokens=1, vocab_size=3)

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(launch, "ready_tree", lambda *given, **rest: None)
    return names


def test_no_sample_is_prepared_unless_it_is_named(prepared, command_line):
    assert command_line("setup")[0] == 0
    assert prepared == []
    code, out, _ = command_line("setup", "--dataset", "dolma")
    assert (code, out) == (0, "data     : 2 documents, 1 tokens of dolma\n")
    assert prepared == ["dolma"]


def test_an_unknown_sample_is_refused_before_anything(prepared, command_line):
    code, _, err = command_line("setup", "--dataset", "dolma", "--dataset", "c4")
    assert code == 2
    assert "'c4'" in err and "wikipedia" in err
    assert prepared == []
