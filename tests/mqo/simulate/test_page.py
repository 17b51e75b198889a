"""The page: its numbers, and that it is one file."""

import json
import re

import pytest
from mqo.launch.config import Cluster, resolve
from mqo.scale.memory import CONTEXT
from mqo.simulate.facts import RankFacts
from mqo.simulate.page import COLORS, page
from mqo.simulate.result import Simulation

from ..report.conftest import contrast

GIB = 1 << 30
SIZES = {kind: (n + 1) * GIB for n, kind in enumerate(COLORS)}
PRODUCT = {
    "layer": "decoder.layers.*.<b>",
    "gemm": "fprop",
    "quant_type": "mxfp8",
    "shape": (1, 4096, 5120, 6144),
    "flops": 2 * 4096 * 5120 * 6144,
    "size": 10**6,
    "masked": 0.0,
    "calls": 12,
}
SENT = {
    "operation": "all-reduce",
    "group": "</script><script>alert(1)",
    "ranks": 2,
    "nodes": 1,
    "size": 10**9,
    "calls": 3,
}


def facts(stage, stages):
    step = {"micro_batches": 1, "works": [PRODUCT], "exchanges": [SENT]}
    timeline = {kind: [size // 2, size] for kind, size in SIZES.items()}
    alive = {"kind": "weights", "line": "megatron/</script>.py:7", "bytes": 5 * GIB, "tensors": 321}
    return RankFacts(
        **{"rank": 4 * stage, "world": 8, "stage": stage, "stages": stages, "chunks": 1},
        **{"micro_batch": 1, "sequence": 64, "data": 4, "global_batch": 4, "parameters": 1},
        **{"setup_peak": 1, "step_peaks": [28 * GIB] * 2, "peak": 28 * GIB, "kinds": SIZES},
        **{"at_peak": [alive], "steps": [step, step]},
        timeline=timeline | {"operation": [1, 9], "operations": 10},
    )


def simulation(stages=1):
    cluster = Cluster(nproc_per_node=8)
    config = resolve("llama32-1b", "wikipedia", "mxfp8", "standard", cluster=cluster)
    ranks = tuple(facts(stage, stages) for stage in range(stages))
    return Simulation(config, "h100-80gb", "PP <2>", 1.0, ranks)


@pytest.fixture
def html(monkeypatch):
    monkeypatch.setattr("mqo.simulate.page.plotly_source", lambda: "plotly")
    return page(simulation(2))


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.partition("<script")[0]))


def test_the_numbers_are_the_simulations(html):
    text, found = text_of(html), simulation(2)
    assert f"in all {found.need / GIB:.1f}" in text
    assert found.need == 28 * GIB + CONTEXT
    for n, kind in enumerate(COLORS):
        assert re.search(rf"{kind} {n + 1}\.0\b", text), kind
    assert re.search(r"megatron/.*\.py:7 weights 321 5\.000", text)
    flops = 12 * PRODUCT["flops"] / 1e12
    assert f"mxfp8 1 4,096 5,120 6,144 12 {flops:.2f}" in text
    assert re.search(r"all-reduce 2 1 3 3\.00 0\.0067", text)


def test_each_stage_has_its_curve(html):
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert [stage["name"] for stage in data["stages"]] == [
        "rank 0, stage 0 of 2",
        "rank 4, stage 1 of 2",
    ]
    for stage in data["stages"]:
        assert stage["x"] == [1, 9]
        assert {one["name"]: one["y"][1] for one in stage["curves"]} == {
            kind: n + 1.0 for n, kind in enumerate(COLORS)
        }


def test_the_page_is_one_file_and_names_are_no_markup(html):
    assert not re.search(r"(src|href)=.(https?:)?//", html)
    assert "<script>alert" not in html
    assert "decoder.layers.*.<b>" not in html
    assert html.count("<script") == html.count("</script>") == 3


@pytest.mark.parametrize(("column", "paper"), [(0, "#ffffff"), (1, "#1b1f24")])
def test_kinds_stand_out_from_the_page(column, paper):
    assert all(contrast(pair[column], paper) >= 3 for pair in COLORS.values())


def test_the_picture_is_drawn_and_fits_a_phone(browser, tmp_path):
    pytest.importorskip("plotly")
    (tmp_path / "a page.html").write_text(page(simulation(2)), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 400, "height": 800})
    tab.goto((tmp_path / "a page.html").as_uri())
    tab.wait_for_selector("html[data-ready]", state="attached")
    assert tab.locator(".plot .fills path").count() == 2 * len(COLORS)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
