"""Estimates in native formats, by hand."""

import json
import re

import pytest
from mqo.errors import MqoError
from mqo.launch.config import Cluster, resolve
from mqo.launch.machine import imagined
from mqo.launch.plan import workload_of
from mqo.megatron.simulation.rows import KINDS
from mqo.quant.formats import FORMATS, SITES
from mqo.scale.devices import DEVICES, device
from mqo.scale.layout import Layout
from mqo.scale.memory import Arithmetic, stage_memory
from mqo.simulate.facts import RankFacts
from mqo.simulate.lines import native_lines
from mqo.simulate.native import (
    NativeEstimate,
    check_formats,
    formats_of,
    gemm_types,
    native_step,
    pair_of,
)
from mqo.simulate.result import Simulation

B200 = device("b200")
NONE = "none"
TOKENS, WIDTH, OUT = 8192, 4096, 14336
SHAPES = {
    "fprop": (TOKENS, OUT, WIDTH),
    "dgrad": (TOKENS, WIDTH, OUT),
    "wgrad": (OUT, WIDTH, TOKENS),
}


def gemm(site, quant_type=NONE, calls=1, layer="mlp"):
    m, n, k = SHAPES[site]
    size = 2 * (m * k + k * n + m * n)
    row = {"layer": layer, "gemm": site, "quant_type": quant_type, "shape": (1, m, n, k)}
    sizes = {"flops": 2 * m * n * k, "size": size, "masked": 0.0, "operands": (m * k, k * n)}
    return row | sizes | {"calls": calls}


def attention(heads=32, length=8192, width=128):
    count = heads * length * width
    row = {"layer": "core", "gemm": "fused attention", "quant_type": NONE}
    sizes = {"shape": (heads, length, length, width), "flops": 4 * heads * length**2 * width}
    return row | sizes | {"size": 8 * count, "masked": 0.5, "operands": (count,) * 2, "calls": 1}


COPY = {
    "layer": "mlp",
    "gemm": "copy_",
    "quant_type": None,
    "shape": (),
    "flops": 0,
    "size": 10**9,
    "masked": 0.0,
    "calls": 1,
}


def rank(*works, micro_batches=1):
    step = {"micro_batches": 1, "works": list(works), "exchanges": []}
    return RankFacts(
        **{"rank": 0, "world": 64, "stage": 0, "stages": 1, "chunks": 1, "micro_batch": 1},
        **{"sequence": 8192, "data": 64, "global_batch": 64 * micro_batches, "parameters": 1},
        **{"setup_peak": 1, "step_peaks": [40 << 30] * 2, "peak": 40 << 30, "at_peak": []},
        kinds=dict.fromkeys(KINDS, 1),
        timeline={},
        steps=[step, step],
    )


def types(linear=NONE, qk=NONE, pv=NONE):
    sites = {name: linear for name, site in SITES.items() if site.layer == "linear"}
    return sites | {"qk": qk, "pv": pv}


def step(facts, chosen, on=B200):
    linear = {key: {pair_of(key[1], chosen[key[1]]): 1.0} for key in gemm_types(facts)}
    return native_step(facts, linear, chosen, on)


LINEAR = rank(*map(gemm, SHAPES), COPY)


def test_without_types_the_step_is_the_simulated_one():
    facts = rank(*map(gemm, SHAPES), attention(), COPY)
    base = Simulation(None, "b200", "", 1.0, (facts,))
    assert step(facts, types()).roofline == base.roofline(facts)
    assert step(facts, types()).quantizing.seconds == 0


@pytest.mark.parametrize(
    ("quant_type", "rate"), [("mxfp8", 4500), ("mxfp6_e2m3", 4500), ("nvfp4", 9000)]
)
def test_a_large_gemm_takes_its_flops_at_the_rate_of_the_format(quant_type, rate):
    flops = 3 * 2 * TOKENS * OUT * WIDTH
    native = step(LINEAR, types(quant_type)).roofline
    assert native.products.seconds == pytest.approx(flops / (rate * 1e12))


def test_a_narrow_gemm_takes_the_bytes_of_its_codes_and_its_result():
    count = 10**9
    work = gemm("fprop") | {"shape": (1, 1, 8, count // 8), "flops": 2 * count}
    work |= {"size": 2 * (count // 8 + count + 8), "operands": (count // 8, count)}
    facts = rank(work)
    code = 1 + 1 / 32
    seconds = (code * 1.125 * count + 2 * 8) / 8e12
    assert step(facts, types("mxfp8")).roofline.products.seconds == pytest.approx(seconds)


def test_a_tensor_is_read_once_and_written_for_each_gemm():
    x, weight, grad = TOKENS * WIDTH, OUT * WIDTH, TOKENS * OUT
    code = FORMATS["mxfp8"].packed_bytes
    native = step(LINEAR, types("mxfp8"))
    assert native.quantizing.size == (2 + 2 * code) * (x + weight + grad)
    assert native.quantizing.seconds == pytest.approx(native.quantizing.size / 8e12)
    others = native.roofline.others.seconds - native.quantizing.seconds
    assert others == pytest.approx(10**9 / 8e12)
    only = types() | {"wgrad": "mxfp8"}
    assert step(LINEAR, only).quantizing.size == (2 + code) * (x + grad)


def test_a_scale_of_the_tensor_costs_a_second_read():
    count = TOKENS * WIDTH + OUT * WIDTH
    chosen = types() | {"fprop": "fp8_tensor"}
    assert step(LINEAR, chosen).quantizing.size == (2 * 2 + 1) * count


def test_attention_takes_the_rate_of_each_half():
    facts = rank(attention())
    half = 4 * 32 * 8192**2 * 128 / 2 / 2
    before = step(facts, types()).roofline.products.seconds
    assert before == pytest.approx(2 * half / 2250e12)
    for qk, pv, rates in (("mxfp8", NONE, (4500, 2250)), ("mxfp8", "nvfp4", (4500, 9000))):
        after = step(facts, types(qk=qk, pv=pv)).roofline.products.seconds
        assert after == pytest.approx(sum(half / (rate * 1e12) for rate in rates))
    backward = attention() | {"gemm": "fused attention backward"}
    facts = rank(backward)
    assert step(facts, types(qk="mxfp8", pv="mxfp8")).roofline == step(facts, types()).roofline


def test_quantized_values_of_attention_are_counted_and_probabilities_are_not():
    count, code = 32 * 8192 * 128, FORMATS["mxfp8"].packed_bytes
    facts = rank(attention())
    assert step(facts, types(qk="mxfp8")).quantizing.size == 2 * count * (2 + code)
    assert step(facts, types(pv="mxfp8")).quantizing.size == count * (2 + code)


def test_a_gemm_of_two_formats_takes_the_wider_ones_rate_and_one_of_bf16_stays():
    facts = rank(gemm("fprop"))
    for pair, rate in (("mxfp8 x mxfp4", 4500), ("mxfp4", 9000), ("none x mxfp4", 2250)):
        native = native_step(facts, {("mlp", "fprop"): {pair: 1.0}}, types(), B200)
        seconds = 2 * TOKENS * OUT * WIDTH / (rate * 1e12)
        assert native.roofline.products.seconds == pytest.approx(seconds), pair
    assert native.quantizing.size == 0


def test_layers_without_a_type_keep_their_share():
    facts = rank(gemm("fprop", calls=4))
    simulated = rank(gemm("fprop", "mxfp4", calls=3), gemm("fprop", NONE, calls=1))
    assert gemm_types(simulated) == {("mlp", "fprop"): {"mxfp4": 0.75, NONE: 0.25}}
    native = native_step(facts, gemm_types(simulated), types(), B200)
    one = 2 * TOKENS * OUT * WIDTH / 1e12
    assert native.roofline.products.seconds == pytest.approx(3 * one / 9000 + one / 2250)


@pytest.mark.parametrize("chosen", [types("mxfp8"), types(qk="mxfp8"), types("mxfp8", "mxfp8")])
def test_a_narrower_format_or_more_sites_never_slow_gemms_down(chosen):
    facts = rank(*map(gemm, SHAPES), attention(), COPY)
    wide = step(facts, chosen).roofline.products.seconds
    narrow = {site: name.replace("mxfp8", "mxfp4") for site, name in chosen.items()}
    assert step(facts, narrow).roofline.products.seconds <= wide
    assert wide < step(facts, types()).roofline.products.seconds
    more = chosen | {"pv": "mxfp8"}
    assert step(facts, more).roofline.products.seconds < wide


@pytest.mark.parametrize(
    ("device_name", "name", "other"),
    [("h100-80gb", "mxfp4", "b200"), ("a100-80gb", "fp8_block", "h100-80gb")],
)
def test_a_format_that_the_device_lacks_is_named_with_a_device_that_has_it(
    device_name, name, other
):
    with pytest.raises(MqoError) as caught:
        check_formats([name], device_name)
    assert caught.value.found == f"{device_name} has no GEMMs in {name}"
    assert f"--device {other}" in caught.value.help


@pytest.mark.parametrize("name", ["hifp8", "hif4", "mxint8", "mixed"])
def test_a_format_without_hardware_has_no_estimate_on_any_device(name):
    for device_name in DEVICES:
        with pytest.raises(MqoError) as caught:
            check_formats([name], device_name)
        assert name in caught.value.found
        assert "--native" in caught.value.help


def test_the_complete_text_of_an_unavailable_format():
    with pytest.raises(MqoError) as caught:
        check_formats(["nvfp4"], "h200")
    assert str(caught.value) == (
        "h200 has no GEMMs in nvfp4. Expected: formats of h200: fp8_block, fp8_block_fp32, "
        "fp8_tensor_e4m3, fp8_tensor_e5m2. Use --device b200, which has nvfp4."
    )


def test_families_are_the_formats_of_their_operands():
    assert pair_of("dgrad", "fp8_tensor") == "fp8_tensor_e5m2 x fp8_tensor_e4m3"
    assert pair_of("fprop", "fp8_tensor") == "fp8_tensor_e4m3"
    assert formats_of(["fp8_tensor", NONE, "mxfp8"]) == [
        "fp8_tensor_e4m3",
        "fp8_tensor_e5m2",
        "mxfp8",
    ]


def estimate(mode="linear_mxfp8", gemms="all", device_name="b200"):
    cluster = Cluster(nnodes=8, nproc_per_node=8)
    config = resolve("llama31-8b", "wikipedia", mode, "standard", cluster=cluster, gemms=gemms)
    chosen = dict(config.quantization.types)
    facts = rank(*map(gemm, SHAPES), attention(), COPY)
    ranks = [gemm(site, chosen[site]) if chosen[site] != NONE else gemm(site) for site in SHAPES]
    work = workload_of(config, imagined(device_name, 8), chosen)
    base = Simulation(config, device_name, "DP 64", 1.0, (facts,))
    return NativeEstimate(config, base, (rank(*ranks),), chosen, work, Layout(64))


def test_inputs_are_saved_as_codes_if_wgrad_quantizes_them():
    saves, keeps = estimate(), estimate(gemms="fprop")
    work = saves.work
    memory = stage_memory(work.model, work.training, Arithmetic("mxfp8"), saves.layout, 0)
    assert saves.base.need - saves.need() == round(memory.packed) > 1 << 30
    assert keeps.need() == keeps.base.need
    assert saves.fits and keeps.fits


def test_every_line_with_a_figure_says_that_it_is_estimated_or_assumed():
    text = native_lines(estimate())
    start = next(n for n, line in enumerate(text) if line.endswith("native")) + 1
    notes = next(n for n, line in enumerate(text) if "assumed" in line or "peaks" in line)
    figures = [line for line in text[start:notes] if re.search(r"\d", line.replace("bf16", ""))]
    assert len(figures) == 9
    assert all("estimated" in line for line in figures)
    assert "4,500 TFLOP/s in mxfp8" in " ".join(text[notes:])
    assert max(map(len, text)) <= 80


def test_the_table_for_json_has_all_figures():
    table = json.loads(json.dumps(estimate().as_table()))
    assert table["estimated"] is True
    assert table["formats"] == ["mxfp8"]
    speedups = table["speed_up"]
    assert 1 < speedups["serial"] <= speedups["overlapped"] < 2
    for kind in ("serial", "overlapped"):
        ratio = table["seconds"]["unquantized"][kind] / table["seconds"]["native"][kind]
        assert speedups[kind] == pytest.approx(ratio)
    assert table["memory"]["native"] < table["memory"]["unquantized"]
    assert all(len(rate["source"]) > 20 for rate in table["rates"])


def test_short_attention_takes_the_bytes_of_its_codes():
    facts, count = rank(attention(length=16)), 32 * 16 * 128
    codes = FORMATS["mxfp8"].packed_bytes
    seconds = (8 - 3 * 2 + 3 * codes) * count / 8e12
    native = step(facts, types(qk="mxfp8", pv="mxfp8")).roofline
    assert native.products.seconds == pytest.approx(seconds)
