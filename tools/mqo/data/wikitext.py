"""Wikitext to plain text: the prose of an article without markup, notes or tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mwparserfromhell.nodes import Node, Tag, Template, Wikilink
    from mwparserfromhell.wikicode import Wikicode

# Sections that are lists of sources and pointers, never prose.
_APPARATUS = frozenset(
    (
        *("bibliography", "citations", "external links", "footnotes", "further reading", "gallery"),
        *("notes", "notes and references", "references", "see also", "sources", "works cited"),
    )
)

# Tags whose content is a note, a formula, a picture or code for a renderer.
_DROPPED_TAGS = frozenset(
    (
        *("ce", "chem", "hiero", "math", "score", "timeline"),
        *("gallery", "imagemap", "ref", "references", "style", "table"),
    )
)

# Tags that a browser puts on their own line.
_BLOCK_TAGS = frozenset(
    ("blockquote", "br", "dd", "div", "dl", "dt", "hr", "li", "ol", "p", "poem", "tr", "ul")
)

# Templates inside a sentence: dropping them would leave a gap in it. The value says
# which positional arguments are read aloud.
_SPOKEN_TEMPLATES = {
    "convert": (1, 2),
    "cvt": (1, 2),
    "lang": (2,),
    "nobr": (1,),
    "nowrap": (1,),
    "quote": (1,),
    "small": (1,),
    "transl": (2,),
    "visible anchor": (1,),
}

# Links into these namespaces place a picture or file the article; they are not words of it. A short
# lower-case prefix is another language's edition; [[CSI: Miami]] is an article like any other.
_SILENT_LINK = re.compile(
    r"(?i:file|image|media|category|wikipedia|template|portal|help)\s*:"
    r"|(?:[a-z]{2,3}|simple|zh-[a-z-]+):(?=\S)"
)

_SPACES = (r"[ \t\u00a0\u2009]+", " ")
# What removals leave, and its replacement, in the order of application.
_CLEAN_UPS = [
    (re.compile(pattern, re.MULTILINE), text)
    for pattern, text in (
        (r"__[A-Z]+__", ""),  # a magic word
        (r"'{2,}", ""),
        # Rows of a table whose opening mark was in a template, so that the parser saw no table.
        (r"^\s*(?:\{\||\|\}|\|-|\|\+|[|!]).*$", ""),
        _SPACES,
        (r"\(\s*(?:[,;]\s*)+", "("),
        (r"(?:\s*[,;])*\s*\)", ")"),
        (r"\(\s*(?:[,;:]\s*)*\)|\[\s*\]", ""),
        _SPACES,
        (r"[ \t]+([,;]|\.(?=\s|\Z))", r"\1"),
        (r" *\n *", "\n"),
        (r"\n{3,}", "\n\n"),
    )
]


def clean(wikitext: str) -> str:
    """Return the prose of one article as plain text, with an empty line between paragraphs.

    Kept: paragraphs, headings of sections that have any prose, list items (one per line), the
    visible text of links. Dropped: templates except those inside a sentence, notes, tables,
    formulas, pictures, comments, and the closing sections that list sources. Returns an empty
    string for a page without prose.
    """
    import mwparserfromhell

    code = mwparserfromhell.parse(wikitext, skip_style_tags=False)
    sections = code.get_sections(flat=True, include_lead=True)
    return "\n\n".join(_with_headings([_section(part) for part in sections]))


def _section(code: Wikicode) -> tuple[int, str, str]:
    """Return (level, heading, body) of a flat section; the lead has level 0 and no heading."""
    headings = code.filter_headings(recursive=False)
    level, title = (headings[0].level, _tidy(_text(headings[0].title))) if headings else (0, "")
    body = "".join(_node(n) for n in code.nodes if n not in headings)
    return level, title, _tidy(body)


def _with_headings(sections: list[tuple[int, str, str]]) -> list[str]:
    """Return bodies under headings; a section is skipped if neither it nor one below has prose."""
    parts: list[str] = []
    pending: list[tuple[int, str]] = []
    dropped_level: int | None = None
    for level, title, body in sections:
        if dropped_level is not None and level > dropped_level:
            continue
        dropped_level = level if title.casefold() in _APPARATUS else None
        pending = [above for above in pending if above[0] < level]
        if dropped_level is not None:
            continue
        if title:
            pending.append((level, title))
        if body:
            parts += [above for _, above in pending]
            parts.append(body)
            pending = []
    return parts


def _text(code: Wikicode | None) -> str:
    return "" if code is None else "".join(_node(n) for n in code.nodes)


def _node(node: Node) -> str:
    from mwparserfromhell import nodes

    if isinstance(node, nodes.Text):
        return str(node)
    if isinstance(node, nodes.Wikilink):
        return _wikilink(node)
    if isinstance(node, nodes.Tag):
        return _tag(node)
    if isinstance(node, nodes.Template):
        return _template(node)
    if isinstance(node, nodes.ExternalLink):
        return _text(node.title)  # a bare address is not prose; a titled one shows only its title
    if isinstance(node, nodes.HTMLEntity):
        return str(node.normalize())
    if isinstance(node, nodes.Heading):
        return f"\n\n{_text(node.title)}\n\n"
    return ""  # a comment, or an argument of a template's own source


def _wikilink(node: Wikilink) -> str:
    target = str(node.title).strip()
    if _SILENT_LINK.match(target):
        return ""
    if node.text is not None and str(node.text).strip():
        return _text(node.text)
    return target.removeprefix(":").replace("#", " ", 1).strip()


def _tag(node: Tag) -> str:
    name = str(node.tag).strip().casefold()
    if name in _DROPPED_TAGS:
        return ""
    content = _text(node.contents)
    if name not in _BLOCK_TAGS:
        return content
    if content:
        return f"\n{content}\n"
    # The mark of a list item is at the start of a line already.
    return "" if node.wiki_markup else "\n"


def _template(node: Template) -> str:
    spoken = _SPOKEN_TEMPLATES.get(str(node.name).strip().casefold(), ())
    values = (_text(node.get(n).value).strip() for n in spoken if node.has(n))
    return " ".join(v for v in values if v)


def _tidy(text: str) -> str:
    """Clean up what removals leave: empty brackets, stray marks, runs of spaces and empty lines."""
    for pattern, replacement in _CLEAN_UPS:
        text = pattern.sub(replacement, text)
    return text.strip()
