"""The site, built as CONTRIBUTING.md says: whole, no link dead, nothing loaded from elsewhere."""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from markdown_it import MarkdownIt
from mqo.cli import app
from typer.main import get_command

pytestmark = pytest.mark.slow
for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
    pytest.importorskip(package, reason="the extra 'docs' is missing: python tests/get_packages.py")

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
MODULES = ("mqo.quant", "mqo.megatron.losses")
BASE = "http://site/"


class Html(HTMLParser):
    """What a page holds: tags, text, ids, links, and what a browser loads for it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.ids, self.links, self.loaded = Counter(), "", set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if found.get("class") == "headerlink":
            return
        self.tags[tag] += 1
        self.ids.add(found.get("id"))
        self.links += [found[name] for name in ("href", "src") if found.get(name)]
        if address := found.get(LOADED.get(tag)):
            self.loaded.append(address)

    def handle_data(self, data):
        self.text += data


def build(target, *options):
    """The output of the documented command; its exit code."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", target]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.stdout + done.stderr, done.returncode


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    target = tmp_path_factory.mktemp("a site") / "built"
    assert build(target) == ("", 0)
    return target


@pytest.fixture(scope="module")
def pages(site):
    """{path in the site: Html} of all pages."""
    return {
        path.relative_to(site).as_posix(): Html(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
    }


def source(name):
    """The Markdown of a page; None where it was made."""
    page = ROOT / name
    found = page.with_name("README.md") if page.name == "index.html" else page.with_suffix(".md")
    return found if found.exists() else None


def test_each_page_of_the_documentation_is_there(pages):
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "script/README.md")
    wanted = {ROOT / name for name in names}
    wanted |= {*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")}
    assert wanted <= {source(name) for name in pages}


def test_links_and_anchors_lead_somewhere(site, pages):
    faults, checked = [], 0
    for name, page in pages.items():
        for link in page.links:
            url = urlsplit(urljoin(BASE + name, link))
            if url.netloc != "site" or url.scheme != "http":
                continue
            checked += 1
            path = unquote(url.path.removeprefix("/")) or "index.html"
            target = pages.get(path)
            if not (site / path).is_file():
                faults.append(f"{name}: {link}")
            elif url.fragment and target and unquote(url.fragment) not in target.ids:
                faults.append(f"{name}: {link}, an anchor")
    assert faults == []
    assert checked > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loaded = {urljoin(BASE + name, link) for name, page in pages.items() for link in page.loaded}
    assert [url for url in loaded if not url.startswith((BASE, "data:"))] == []
    assert any(url.endswith(".js") for url in loaded)
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert "@media" in styles
    assert re.findall(r"(?:url\(|@import)[^;)]*//[^;)]*", styles) == []


def test_a_page_shows_what_a_code_host_shows_of_its_markdown(site, pages):
    """Tables, lists, code and text: the Markdown of mkdocs differs from that of code hosts."""
    kinds = ("table", "tr", "td", "ul", "ol", "li", "pre", "img", "h1", "h2", "h3", "em", "strong")
    markdown = MarkdownIt("commonmark").enable("table")
    compared = 0
    for name in pages:
        if (path := source(name)) is None:
            continue
        compared += 1
        text = (site / name).read_text(encoding="utf-8")
        shown = Html(re.search(r"<article[^>]*>(.*?)</article>", text, re.DOTALL)[1])
        wanted = Html(markdown.render(path.read_text(encoding="utf-8")))
        counts = [{kind: of.tags[kind] for kind in kinds} for of in (shown, wanted)]
        assert counts[0] == counts[1], path
        assert "".join(shown.text.replace("¶", "").split()) == "".join(wanted.text.split()), path
    assert compared > 50


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_with_a_docstring_is_documented(pages, module):
    folder = ROOT / "tools" / module.replace(".", "/")
    public = set(importlib.import_module(module).__all__)
    documented = {
        node.name
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    }
    ids = pages[f"api/{module}.html"].ids
    assert public & documented
    assert public & documented <= {name.rpartition(".")[2] for name in ids if name}


def test_each_command_and_option_is_documented(pages):
    page, waiting = pages["api/command_line.html"], [("mqo", get_command(app))]
    words = re.findall(r"-[\w-]*\w", page.text)
    while waiting:
        name, command = waiting.pop()
        assert name.replace(" ", "-") in page.ids
        waiting += [(f"{name} {n}", sub) for n, sub in getattr(command, "commands", {}).items()]
        shown = (one for one in command.params if one.param_type_name == "option")
        for option in (one for one in shown if not one.hidden):
            assert set(option.opts) <= set(words)
    assert "--training-config" in page.text


@pytest.mark.parametrize("width", [400, 1200])
def test_it_fits_and_finds_without_a_network(site, browser, width):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = f"http://127.0.0.1:{server.server_port}/"
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        for name in ("docs/formats.html", "api/mqo.quant.html", "index.html"):
            page.goto(start + name)
            assert page.evaluate("document.documentElement.scrollWidth") == width
        page.locator("label[for=__search]").first.evaluate("label => label.click()")
        page.locator(".md-search__input").press_sequentially("hadamard")
        page.wait_for_selector(".md-search-result__item")
        page.close()
        server.shutdown()
    assert [url for url in asked if not url.startswith((start, "data:"))] == []
