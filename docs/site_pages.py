"""Choose the pages of the site, as a hook of mkdocs: those in mkdocs.yml, and docs/*.md.

Each page keeps its path in the repository, so that links work on a code host and on the site. Files
that pages link to are included.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mqo.cli import app
from mqo.launch.arguments import parser
from typer.cli import get_docs_for_click

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "tools"
LINK = re.compile(r"\]\(([^)#\s]+)")
CODE = re.compile(r"`[^`\n]+`")
GENERATED = "api/"
FUNCTION = """\
    options:
      heading_level: 2
      show_root_full_path: false
      show_root_heading: true
      show_root_toc_entry: true"""
DOCSTRING = """\
    options:
      members: []"""
COMMANDS = "command_line"  # the only generated page that does not document a module


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder in the navigation by its pages."""
    for section in config.nav:
        for title, entries in section.items():
            if isinstance(entries, list):
                section[title] = [name for entry in entries for name in _expanded(entry)]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Replace the files of docs_dir by the repository's pages, and add the generated API pages."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    named = [*_names(config.nav), *config.extra_css]
    for name in (name for name in named if name.startswith(GENERATED)):
        files.append(File.generated(config, name, content=_generated(Path(name).stem)))
    for path in _with_linked([*(ROOT / name for name in named), *ROOT.glob("docs/*.md")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Unescape pipes in code in tables: code hosts need the escape, mkdocs would show it."""
    rows = (
        CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )
    return "\n".join(rows)


def _expanded(entry: Any) -> list[Any]:
    if isinstance(entry, str) and entry.endswith("/"):
        return [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(f"{entry}*.md"))]
    return [entry]


def _names(nav: Any) -> Iterator[str]:
    """Yield the paths in a navigation, at any depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _names(entry)


def _with_linked(pages: Iterable[Path]) -> Iterator[Path]:
    """Yield each page, and each file of the repository that a page links to, once."""
    known, waiting = set(), list(pages)
    while waiting:
        path = waiting.pop()
        if path in known or not path.is_file() or not path.is_relative_to(ROOT):
            continue
        known.add(path)
        yield path
        if path.suffix == ".md":
            links = LINK.findall(path.read_text(encoding="utf-8"))
            waiting += [(path.parent / link).resolve() for link in links]


def _generated(name: str) -> str:
    """Return the Markdown of an API page: all commands, or the public names of a module."""
    return _commands() if name == COMMANDS else _module(name)


def _commands() -> str:
    context = click.Context(typer.main.get_command(app), info_name="mqo")
    text = get_docs_for_click(obj=context.command, ctx=context, name="mqo")
    # Lists of commands repeat the headings, with truncated texts.
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)
    launcher = parser()
    launcher.prog = "train_config.py"
    return f"{text}\n## `script/train_config.py`\n\n```text\n{launcher.format_help()}```\n"


def _module(name: str) -> str:
    """Return a page of the functions and classes that a package exports, from their modules."""
    folder = PACKAGES / name.replace(".", "/")
    stub = folder / "__init__.pyi"
    source = stub if stub.exists() else folder / "__init__.py"
    imports = [
        n for n in ast.parse(source.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)
    ]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    shown = (full for full in names if not full.rpartition(".")[2].isupper())
    pages = (f"::: {full}\n{FUNCTION}" for full in shown)
    return "\n\n".join([f"# {name}", f"::: {name}\n{DOCSTRING}", *pages])
