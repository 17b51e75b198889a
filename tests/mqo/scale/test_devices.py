"""GPUs by name."""

import pytest
from mqo.errors import UnknownNameError
from mqo.quant.formats import FORMATS
from mqo.scale.devices import DEVICES, device


def test_a_device_has_its_memory_and_an_unknown_one_lists_the_valid_names():
    assert device("h200") is DEVICES["h200"]
    with pytest.raises(UnknownNameError) as caught:
        device("v100")
    assert str(caught.value) == (
        "There is no device called 'v100'. Expected: one of a100-40gb, a100-80gb, b200, gb200, "
        "h100-80gb, h200."
    )


def test_native_rates_are_dense_and_each_has_a_dated_source():
    for name, row in DEVICES.items():
        listed = [quant_type for rate in row.native for quant_type in rate.formats]
        assert len(listed) == len(set(listed)), name
        assert set(listed) <= set(FORMATS), name
        for rate in row.native:
            assert "read 2026-11-26" in rate.source
            expected = 2 if "fp8_block" in rate.formats else 4
            factor = rate.tflops / row.bf16_tflops
            assert factor == pytest.approx(expected, rel=1e-3), name


def test_a_format_has_the_rate_of_its_device_and_bf16_is_no_format():
    assert DEVICES["a100-80gb"].native == ()
    assert DEVICES["h200"].native_rate("mxfp8") is None
    assert DEVICES["b200"].tflops("nvfp4") == 2 * DEVICES["b200"].tflops("mxfp8") == 9000
    assert DEVICES["b200"].tflops("none") == DEVICES["b200"].bf16_tflops
