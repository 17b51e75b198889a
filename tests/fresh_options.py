"""Fixtures: options and records of the quantizers that no other test has touched."""

import pytest
from mqo.quant import config
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    monkeypatch.delenv(config.ENVIRONMENT_VARIABLE, raising=False)
    config.reset()
    RECORDER.reset()
    set_step(0)
    yield
    config.reset()
    RECORDER.reset()


@pytest.fixture
def options(monkeypatch, tmp_path):
    """A function that makes a TOML text the options of this process, and returns its path."""

    def write(text):
        path = tmp_path / "quant.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, str(path))
        config.reset()
        return path

    return write
