"""GPUs by name."""

import pytest
from mqo.errors import UnknownNameError
from mqo.scale.devices import DEVICES, device


def test_a_device_has_its_memory_and_an_unknown_one_lists_the_valid_names():
    assert device("h200") is DEVICES["h200"]
    with pytest.raises(UnknownNameError) as caught:
        device("v100")
    assert str(caught.value) == (
        "There is no device called 'v100'. Expected: one of a100-40gb, a100-80gb, b200, h100-80gb, "
        "h200."
    )
