"""The page in a real browser: it draws, it answers a click, it fits a phone, it turns dark."""

import pytest
from mqo.report.collect import collect
from mqo.report.compare import compare
from mqo.report.page import page

from .conftest import make_run

pytest.importorskip("plotly")
MODES = ("bf16", "FA_linear_mxfp8", "mxfp4")
CURVE = "document.querySelector('[data-kind=loss]').data.find(t => t.meta !== 'band')"


def page_of(root):
    """The address of the page of a folder of runs; test_page.py writes a whole report."""
    found, left_out = collect([root])
    groups, _ = compare(found)
    (root / "index.html").write_text(page(groups, left_out, "2026-11-21"), encoding="utf-8")
    return (root / "index.html").as_uri()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs of a report")
    for seed in (1, 2):
        for n, mode in enumerate(MODES):
            make_run(root / f"{mode} {seed}", mode, seed=seed, loss=6 + n / 50 + seed / 100)
    make_run(root / "a failed one", "mxfp4").result.unlink()
    return page_of(root)


@pytest.fixture
def open_page(browser, report):
    """A function that opens the page; whatever it logs or fetches fails the test at its end."""
    said, contexts = [], []

    def start(width=1280, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(request.url))
        page.goto(report)
        page.wait_for_selector("html[data-ready]")
        return page

    yield start
    for context in contexts:
        context.close()
    assert said == []


def visible(page, kind):
    """Of each curve of a plot, by name, whether it and its band are shown."""
    script = f"document.querySelector('[data-kind={kind}]').data.map(t => [t.name, t.visible])"
    found = {}
    for name, there in page.evaluate(script):
        assert found.setdefault(name, there) == there
    return found


def test_curves_have_bands_hide_by_a_click_in_the_legend_and_zoom_together(open_page):
    page = open_page()
    names = {"bf16 (unquantized)", *MODES[1:]}
    assert set(visible(page, "loss")) == set(visible(page, "valid")) == names
    assert set(visible(page, "difference")) == set(MODES[1:])
    assert page.locator("[data-kind=loss] .scatterlayer .trace").count() == 9
    button = page.locator(".legend button[data-variant=mxfp4]")
    for shown in (False, True):
        button.click()
        assert button.get_attribute("aria-pressed") == str(shown).lower()
        for kind in ("loss", "difference", "valid"):
            for name, there in visible(page, kind).items():
                assert there is (shown or not name.startswith("mxfp4")), (kind, name)
        page.wait_for_function(
            "n => document.querySelectorAll('[data-kind=loss] .scatterlayer .trace').length === n",
            arg=9 if shown else 6,
        )
    page.locator("[data-kind=loss]").hover()
    bar = page.locator("[data-kind=loss] .modebar-group").first
    bar.wait_for()
    assert bar.evaluate("bar => getComputedStyle(bar).backgroundColor") == "rgba(0, 0, 0, 0)"
    page.evaluate(
        "Plotly.relayout(document.querySelector('[data-kind=loss]'), {'xaxis.range': [10, 20]})"
    )
    for kind in ("difference", "valid"):
        page.wait_for_function(
            f"String(document.querySelector('[data-kind={kind}]').layout.xaxis.range) === '10,20'"
        )


def test_a_ninth_curve_takes_the_place_of_the_one_shown_longest(browser, tmp_path):
    modes = [f"{family}{kind}" for kind in ("mxfp8", "mxfp4", "hifp8") for family in ("", "FA_")]
    modes += ["nvfp4", "linear_nvfp4", "FA_nvfp4"]
    for mode in ("bf16", *modes):
        make_run(tmp_path / mode, mode)
    page = browser.new_page()
    page.goto(page_of(tmp_path))
    page.wait_for_selector("html[data-ready]")
    before = [name for name, there in visible(page, "loss").items() if there]
    hidden = next(mode for mode in modes if mode not in before)
    page.locator(f".legend button[data-variant={hidden}]").click()
    after = [name for name, there in visible(page, "loss").items() if there]
    assert len(before) == len(after) == 8
    assert {hidden, "bf16 (unquantized)"} <= set(after)
    assert page.locator(".legend button[aria-pressed=true]").count() == 8


@pytest.mark.parametrize("width", [390, 1280])
def test_details_open_by_a_click_and_make_no_page_scroll_sideways(open_page, width):
    page = open_page(width)
    for summary in (".origins > details > summary", "details.diff > summary"):
        page.locator(summary).first.click()
    text = page.locator("details.diff pre").first
    text.wait_for()
    assert "+custom_quant_type = " in text.inner_text()
    assert page.locator("details.diff h4").all_inner_texts() == ["Quant sites", "Added files"]
    page.locator("details.operands > summary").click()
    page.wait_for_selector(".map .heatmaplayer image")
    assert page.locator(".maps figcaption").all_inner_texts() == ["fprop.x underflow"]
    page.locator("details.operands select").select_option("mxfp4")
    page.wait_for_selector(".map .heatmaplayer image")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    boxes = page.evaluate("[...document.querySelectorAll('.scroll')].map(b => b.clientWidth)")
    assert all(box <= width for box in boxes)
    page.locator("details.diff details summary", has_text="megatron/ours.py").click()
    page.wait_for_function("document.body.innerText.includes('<script>alert')")


@pytest.fixture(scope="module")
def wide_report(tmp_path_factory):
    """The page of four modes with three seeds, one of them with long options."""
    root = tmp_path_factory.mktemp("runs of a wide report")
    modes = {"bf16": {}, "FA_linear_mxfp8": {}, "mxfp4": {}, "linear_mxfp4": {"gemms": "all"}}
    for seed in (1, 2, 3):
        for n, (mode, rest) in enumerate(modes.items()):
            facts = {"loss": 6 + n / 50 + seed * (n + 1) / 300, "memory": (7 + n) * 2**30 + seed}
            folder = make_run(root / f"{mode} {seed}", mode, seed=seed, **facts, **rest)
            if rest:
                options = "block = 64\nscale_rule = 'rceil'\n[layers]\nexclude = ['output_layer']\n"
                folder.quant_config.write_text(f"[quantizer]\n{options}")
    return page_of(root)


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_tables_are_whole_or_scroll_in_their_own_box(browser, wide_report, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(wide_report)
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    boxes = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map(b => [b.getAttribute('aria-label'), "
        "b.scrollWidth - b.clientWidth, getComputedStyle(b).overflowX])"
    )
    assert len(boxes) == 3
    for name, hidden, overflow in boxes:
        assert overflow == "auto"
        assert hidden <= 0 or width < 1280, name
    page.close()


def test_a_dark_scheme_makes_page_and_curves_dark_and_back_and_prints_light(open_page):
    page = open_page()
    colors = f"[getComputedStyle(document.body).backgroundColor, {CURVE}.line.color]"
    light = page.evaluate(colors)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"String({colors}[1]) !== {light[1]!r}")
    dark = page.evaluate(colors)
    assert sum(map(int, light[0].strip("rgb()").split(","))) > 3 * 200
    assert sum(map(int, dark[0].strip("rgb()").split(","))) < 3 * 60
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(f"String({colors}[1]) === {light[1]!r}")
    width = "document.querySelector('[data-kind=loss] svg').getBoundingClientRect().width"
    page.wait_for_function(f"{width} === 620")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"String({colors}[1]) === {dark[1]!r} && {width} > 800")
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"String({colors}[1]) === {light[1]!r}")
