"""The page in a real browser, offline: it fits a phone, it turns dark, and it fetches nothing."""

import pytest
from mqo.perf.measure import write
from mqo.perf.sections import sections


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_it_fits_and_takes_the_readers_colors(browser, made, width, scheme):
    asked, measured = made()
    write(asked, measured, sections(measured))
    said, size = [], {"width": width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=scheme, offline=True)
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: said.append(request.url))
    page.goto((measured.folder / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, color.strip("rgb()").split(","))) < 200) == (scheme == "dark")
    lines = page.evaluate(
        "[...document.querySelectorAll('polyline')].map(l => getComputedStyle(l).stroke)"
    )
    assert len(set(lines)) == 2
    page.close()
    assert [url for url in said if not url.startswith(("file:", "data:"))] == []
