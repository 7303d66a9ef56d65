"""What may be on a page or a console, whatever the files say: our own elements and attributes, and printable text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

from distbench.report import decision_html, page

VOID = {"meta", "br"}
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "div", "span", "i", "code"),
    *("br", "table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "dl", "dt", "dd", "section"),
    *("svg", "g", "line", "text", "rect", "circle", "polyline"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "style", "title", "scope", "open", "role"),
    *("aria-label", "viewbox", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points"),
    "text-anchor",
}
"""None of them loads, runs or links to anything."""
STYLES = re.compile(r"(background|color):var\(--[a-z]+\)")
CLASSES = re.compile(r"[a-z0-9 ]*")
NUMBERS = re.compile(r"[-0-9., ]*")


@dataclass
class Page(HTMLParser):
    """A page as a tree is read: elements with the names of their attributes, in order, and all of its text."""

    elements: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Text between tags, and values of the attributes that hold text."""
    open: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, html: str) -> Page:
        """Raises AssertionError for what no page of ours has."""
        read = cls()
        read.feed(html)
        read.close()
        assert not read.open, f"never closed: {read.open}"
        assert read.styles in ([page.STYLE], [page.STYLE + decision_html.STYLE]), "text in the style sheet"
        return read

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, attrs)

    def _take(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, f"<{tag}>"
        for name, value in attrs:
            assert name in ATTRIBUTES, f"<{tag} {name}={value!r}>"
            if name in ("title", "aria-label"):
                self.texts.append(value or "")
            elif name == "style":
                assert STYLES.fullmatch(value or ""), f"<{tag} style={value!r}>"
            elif name == "class":
                assert CLASSES.fullmatch(value or ""), f"<{tag} class={value!r}>"
            elif name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points", "viewbox"):
                assert NUMBERS.fullmatch(value or ""), f"<{tag} {name}={value!r}>"
        self.elements.append((tag, tuple(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}>"

    def handle_data(self, data: str) -> None:
        (self.styles if self.open[-1:] == ["style"] else self.texts).append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"<!--{data}-->")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"<![{data}]>")


def check_page(html: str) -> Page:
    """The page, once it is known to have nothing but what is ours. Raises AssertionError."""
    assert not re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]", html), "a control character"
    return Page.of(html)


def check_console(said: str) -> None:
    """Raises AssertionError for a traceback, or a character that drives a terminal."""
    assert "Traceback (most recent call last)" not in said, said[-2000:]
    odd = {c for c in said if not c.isprintable() and c != "\n"}
    assert not odd, f"not printable: {sorted(odd)!r}"
