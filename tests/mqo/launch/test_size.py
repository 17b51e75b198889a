"""The sizes of a model from elsewhere: published ones are taken, absurd ones are refused."""

import pytest
from mqo.errors import ConvertError
from mqo.launch.size import check_size
from mqo.matrix import tables
from mqo.megatron.run import isolated

from .conftest import published_shape

LARGE = 1 << 45
SHAPES = {name: published_shape(name) for name in tables.models()}


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """A machine that holds every published model."""
    monkeypatch.setattr(isolated, "machine_memory", lambda: LARGE)


@pytest.mark.parametrize("name", tables.models())
def test_a_published_model_is_taken_where_it_fits(name, monkeypatch):
    model = tables.models()[name]
    check_size("config.json", SHAPES[name])
    monkeypatch.setattr(isolated, "machine_memory", lambda: 2 * model.parameters - 1)
    with pytest.raises(ConvertError, match=f"{model.parameters:,} weights"):
        check_size("config.json", SHAPES[name])


def parts():
    """(model, part, field) of each size."""
    for name, model in SHAPES.items():
        for part in ("", "mla", "moe", "mamba"):
            whole = getattr(model, part) if part else model
            for field, size in whole or ():
                if type(size) is int:
                    yield name, part, field


@pytest.mark.parametrize("size", [-1, 10**12])
@pytest.mark.parametrize(("name", "part", "field"), list(parts()))
def test_each_size_has_bounds(name, part, field, size):
    model = SHAPES[name]
    changed = {field: size}
    if part:
        changed = {part: getattr(model, part).model_copy(update=changed)}
    with pytest.raises(ConvertError, match=field):
        check_size("config.json", model.model_copy(update=changed))


@pytest.mark.parametrize("layers", [10_000, 10**9])
def test_more_layers_than_the_memory_holds_are_refused_before_they_are_counted(layers, monkeypatch):
    monkeypatch.setattr(isolated, "machine_memory", lambda: 1 << 35)
    model = SHAPES["llama31-8b"].model_copy(update={"num_layers": layers})
    with pytest.raises(ConvertError):
        check_size("config.json", model)
