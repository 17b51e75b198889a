"""The file in which a program says how far it is."""

import json

from mqo.megatron.run import progress


def test_the_last_state_is_in_the_file_that_the_variable_names(tmp_path, monkeypatch):
    place = tmp_path / "progress.json"
    monkeypatch.setenv(progress.VARIABLE, str(place))
    progress.advance("tokens", 3, 9)
    progress.advance("tokens", 4, 9)
    assert json.loads(place.read_text()) == {"what": "tokens", "done": 4, "total": 9}


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    progress.advance("tokens", 3, 9)
    assert list(tmp_path.iterdir()) == []
