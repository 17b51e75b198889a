import pytest
import torch
from mqo.megatron.attention.masks import ROWS, is_causal


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 9), (3, 7), (2 * ROWS + 3,) * 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_plain_mask_is_causal(queries, keys, batch):
    mask = causal(queries, keys).expand(batch, 1, -1, -1)
    assert is_causal(mask, queries, keys)


@pytest.mark.parametrize("place", [(0, 0, 0, 1), (1, 0, ROWS + 1, 0), (1, 0, ROWS + 1, ROWS + 1)])
def test_one_other_element_is_enough(place):
    mask = causal(ROWS + 2, ROWS + 2).repeat(2, 1, 1, 1)
    mask[place] = ~mask[place]
    assert not is_causal(mask, ROWS + 2, ROWS + 2)


@pytest.mark.parametrize("mask", [causal(4, 5), causal(4, 4).float(), causal(8, 8)])
def test_other_shapes_and_types_are_not(mask):
    assert not is_causal(mask, 4, 4)


def test_a_mask_is_compared_once_until_somebody_writes_to_it(monkeypatch):
    mask, compared = causal(4, 4), []
    compare = is_causal.__globals__["_compare"]
    monkeypatch.setitem(
        is_causal.__globals__, "_compare", lambda *args: compared.append(1) or compare(*args)
    )
    assert is_causal(mask, 4, 4)
    assert is_causal(mask, 4, 4)
    assert len(compared) == 1
    mask[3, 0] = True  # as a document's end does
    assert not is_causal(mask, 4, 4)
    assert len(compared) == 2


def test_a_mask_made_for_inference_has_no_version():
    with torch.inference_mode():
        assert is_causal(causal(4, 4), 4, 4)
