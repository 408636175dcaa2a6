"""The page of a report: well-formed, self-contained, tabs; source with colours; Markdown of our own as HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from autoptd.wings.reports.page import (
    STYLE,
    Tab,
    folded,
    markdown_html,
    page,
    python_html,
    source,
    table,
    tiles,
    viewer,
)

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Balance(HTMLParser):
    """Refuses tags that do not close, ids that are not unique, and anything that is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        for name in ("src", "href", "xlink:href"):
            assert not (given.get(name) or "").startswith(("http:", "https:", "//")), given
        if tag not in VOID:
            self.open.append(tag)
        if given.get("id") and "template" not in self.open:
            self.ids.append(given["id"] or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str) -> Balance:
    """Parse a page; AssertionError where it is not well-formed."""
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == [] and len(set(parser.ids)) == len(parser.ids)
    return parser


def test_a_page_is_well_formed_and_escapes() -> None:
    inside = (
        table(["a<b"], [["`x` & <y>"]], [0])
        + tiles([("1 & 2", "<what>")])
        + folded("a<b", "& c", "<p>d</p>", True)
    )
    text = page(
        "<title>",
        "a & b",
        [
            Tab("One", inside),
            Tab("Two words", viewer("<svg><g id='x'/></svg>", "a <picture>") + source("x\n")),
        ],
    )
    ids = check_page(text).ids
    assert ids == ["tab-one", "tab-two-words"] and 'href="#two-words"' in text
    assert "<code>x</code> &amp; &lt;y&gt;" in text and "<title>&lt;title&gt;</title>" in text
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", text)


def test_a_picture_has_buttons_a_name_and_keys_and_scrolls_without_javascript() -> None:
    html = viewer("<svg/>", 'a <picture> of "it"')
    for value in ("in", "out", "fit", "one"):
        assert re.search(rf'value="{value}" aria-label="\w', html), value
    assert 'tabindex="0" role="group" aria-label="a &lt;picture&gt; of &quot;it&quot;"' in html
    assert "overflow: auto" in STYLE and ".viewer .tools { display: none" in STYLE


def test_colours_follow_the_reader_and_print_is_light() -> None:
    text = page("t", "s", [Tab("One", "")])
    rules = re.findall(r"@media ([^{]*) \{", text)
    assert "screen and (prefers-color-scheme: dark)" in rules
    assert all("screen" in rule for rule in rules if "dark" in rule)
    light, dark = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{([^}]*)\}", text))
    assert dark == light
    # A colour that is written out would be the same on both grounds.
    beyond = text.split("* { box-sizing", 1)[1]
    assert not re.findall(r"#[0-9a-f]{6}\b", beyond)


def test_source_has_colours_and_loses_nothing() -> None:
    code = 'def f(x: int) -> str:  # "why" & <how>\n    """Two\n    lines."""\n    return f"{x:>3}" if x else None\n'
    html = python_html(code)
    assert '<span class="k">def</span> <span class="d">f</span>' in html
    assert '<span class="c"># &quot;why&quot; &amp; &lt;how&gt;</span>' in html
    assert '<span class="s">&quot;&quot;&quot;Two\n    lines.&quot;&quot;&quot;</span>' in html
    bare = re.sub(r"</?span[^>]*>", "", html)
    for char, entity in (("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#x27;"), ("&", "&amp;")):
        bare = bare.replace(entity, char)
    assert bare == code
    assert python_html("x = (") == "x = ("


def test_markdown_of_our_own() -> None:
    html = markdown_html(
        "# Top\n\nSome `code`,\ntwo lines.\n\n## Next\n\n| a | b |\n|---|---|\n| 1 \\| 2 | 3 |\n\n- one\n- two\n"
    )
    assert (
        "<h2>Top</h2>" in html
        and "<h3>Next</h3>" in html
        and "<p>Some <code>code</code>, two lines.</p>" in html
    )
    assert "<td>1 | 2</td><td>3</td>" in html and "<ul><li>one</li><li>two</li></ul>" in html
    check_page(html)
