"""Write one HTML file with tabs: no network, no framework, readable without JavaScript (all tabs below each other).

In: tabs, each a title and HTML made by the functions here. Out: the text of the page.

    page("GPT-2", [Tab("Summary", table(["rank", "bytes"], [["0", "1 GiB"]]))])

The fragment of the address shows a tab (`report.html#schedule`), so that it can be linked to. Colours follow the
reader's settings; print is light. Pictures can be zoomed, moved and fitted by mouse, buttons and keys; without
JavaScript they scroll. Python source has colours: `k` keyword, `s` text, `n` number, `c` comment, `d` a defined name.
"""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #64707d; --line: #d9dee4; --ground: #fff; --soft: #f5f7f9;
  --mark: #1f53a0; --keyword: #8a2f8f; --string: #1c703e; --number: #a14a00; --comment: #6b7682 }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #dde3ea; --quiet: #9aa6b2; --line: #333d47; --ground: #12171d;
  --soft: #1a2129; --mark: #79aff2; --keyword: #d192cd; --string: #7fc79a; --number: #f0a04b; --comment: #94a0ac } }
* { box-sizing: border-box }
body { margin: 0; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink);
  background: var(--ground) }
header { padding: 18px 28px 0; border-bottom: 1px solid var(--line); background: var(--soft); position: sticky; top: 0;
  z-index: 1 }
h1 { font-size: 20px; margin: 0 } h2 { font-size: 17px; margin: 26px 0 8px } h3 { font-size: 15px; margin: 18px 0 6px }
header p { margin: 2px 0 10px; color: var(--quiet) }
nav a { display: inline-block; padding: 7px 13px; margin-right: 2px; color: var(--quiet); text-decoration: none;
  border: 1px solid transparent; border-bottom: 0; border-radius: 6px 6px 0 0 }
nav a:hover { color: var(--ink) } nav a:focus-visible { outline: 2px solid var(--mark) }
nav a[aria-selected=true] { color: var(--mark); background: var(--ground); border-color: var(--line); margin-bottom: -1px;
  font-weight: 600 }
main { padding: 6px 28px 60px; max-width: 1500px }
p, li { max-width: 95ch } .quiet { color: var(--quiet) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: 8px 0; font-size: 13.5px }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600; color: var(--quiet); border-bottom-width: 2px } td.number { text-align: right; white-space: nowrap }
code, pre { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace } pre { margin: 0 }
.source { display: flex; overflow-x: auto; background: var(--soft); border: 1px solid var(--line); border-radius: 6px;
  padding: 10px 0 }
.source .lines { padding: 0 12px; color: var(--quiet); text-align: right; user-select: none } .source code { white-space: pre }
.k { color: var(--keyword) } .s { color: var(--string) } .n { color: var(--number) } .c { color: var(--comment) }
.d { color: var(--mark); font-weight: 600 }
details { border: 1px solid var(--line); border-radius: 6px; margin: 8px 0; padding: 0 14px }
details[open] { padding-bottom: 12px } summary { cursor: pointer; padding: 8px 0; font-weight: 600 }
summary .quiet { font-weight: 400 }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px; min-width: 150px; background: var(--soft) }
.tile b { display: block; font-size: 21px; font-weight: 600 } .tile span { color: var(--quiet); font-size: 13px }
@media print { header { position: static } nav { display: none } section[hidden] { display: block !important } }
.viewer { margin: 12px 0; border: 1px solid var(--line); border-radius: 6px; overflow: hidden }
.viewer:focus-visible { outline: 2px solid var(--mark); outline-offset: 1px }
.viewer .picture { overflow: auto; max-height: 80vh; background: var(--ground) }
.viewer .tools { display: none; gap: 6px; align-items: center; padding: 5px 8px; background: var(--soft);
  border-bottom: 1px solid var(--line); font-size: 13px }
.viewer.live .tools { display: flex } .viewer.live .picture { overflow: hidden; cursor: grab; touch-action: none }
.viewer.held .picture { cursor: grabbing }
.tools button { font: inherit; color: var(--ink); background: var(--ground); border: 1px solid var(--line); border-radius: 5px;
  min-width: 30px; padding: 2px 9px; cursor: pointer }
.tools button:hover { border-color: var(--quiet) } .tools button:focus-visible { outline: 2px solid var(--mark) }
@media print { .viewer { border: 0 } .viewer.live .tools { display: none }
  .viewer .picture { max-height: none; height: auto !important; overflow: visible } }
"""
# Tabs, then pictures: `scale` is screen pixels per pixel of a picture, (`left`, `top`) its point in the corner of the window.
SCRIPT = """
const tabs = [...document.querySelectorAll('nav a')], sections = [...document.querySelectorAll('main > section')];
function show() {
  const wanted = location.hash.slice(1).split('/')[0];
  const chosen = sections.find(one => one.id === 'tab-' + wanted) || sections[0];
  for (const one of sections) one.hidden = one !== chosen;
  for (const one of tabs) one.setAttribute('aria-selected', 'tab-' + one.hash.slice(1) === chosen.id);
}
addEventListener('hashchange', () => { show(); scrollTo(0, 0); });
document.querySelector('nav').addEventListener('keydown', event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], at = tabs.indexOf(document.activeElement);
  if (step && at >= 0) { const next = tabs[(at + step + tabs.length) % tabs.length]; next.focus(); location.hash = next.hash; }
});
show();
for (const viewer of document.querySelectorAll('.viewer')) {
  const host = viewer.querySelector('.picture'), svg = host.shadowRoot && host.shadowRoot.querySelector('svg');
  if (!svg) continue;
  const {width, height} = svg.viewBox.baseVal, whole = svg.getAttribute('viewBox');
  const shown = 'display: block; width: 100%; height: 100%';
  let scale = 0, left = 0, top = 0;
  // A smaller picture is centred in its window, a larger one fills it.
  const keep = (at, seen, size) => seen >= size ? (size - seen) / 2 : Math.min(Math.max(at, 0), size - seen);
  const draw = () => {
    const wide = host.clientWidth / scale, high = host.clientHeight / scale;
    left = keep(left, wide, width); top = keep(top, high, height);
    svg.setAttribute('viewBox', `${left} ${top} ${wide} ${high}`);
    viewer.dataset.scale = scale.toFixed(3);
  };
  const fitted = () => Math.min(host.clientWidth / width, host.clientHeight / height);
  const zoom = (factor, x = host.clientWidth / 2, y = host.clientHeight / 2) => {
    const next = Math.min(Math.max(scale * factor, Math.min(fitted(), 1)), 8);
    left += x / scale - x / next; top += y / scale - y / next; scale = next; draw();
  };
  const move = (x, y) => { left += x / scale; top += y / scale; draw(); };
  const actions = {in: () => zoom(1.25), out: () => zoom(0.8), fit: () => zoom(fitted() / scale), one: () => zoom(1 / scale)};
  const keys = {'+': 'in', '=': 'in', '-': 'out', '_': 'out', '0': 'fit', '1': 'one'};
  const steps = {ArrowLeft: [-60, 0], ArrowRight: [60, 0], ArrowUp: [0, -60], ArrowDown: [0, 60]};
  // A picture in a closed tab or section has no size: it starts when it is first seen, as wide as its window.
  const begin = () => {
    if (!host.clientWidth) return;
    if (!scale) {
      viewer.classList.add('live');
      svg.style.cssText = shown;
      scale = Math.min(1, host.clientWidth / width);
      host.style.height = Math.min(height * scale, 0.8 * innerHeight) + 'px';
    }
    draw();
  };
  // In a separate frame: it changes the size that is observed.
  new ResizeObserver(() => requestAnimationFrame(begin)).observe(host);
  for (const button of viewer.querySelectorAll('button')) button.addEventListener('click', () => actions[button.value]());
  viewer.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys[event.key]) actions[keys[event.key]](); else if (steps[event.key]) move(...steps[event.key]); else return;
    event.preventDefault();
  });
  // Without the key, the wheel scrolls the page unless the picture was clicked before.
  host.addEventListener('wheel', event => {
    if (!event.ctrlKey && !event.metaKey && !viewer.contains(document.activeElement)) return;
    const at = host.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 500), event.clientX - at.left, event.clientY - at.top);
    event.preventDefault();
  }, {passive: false});
  host.addEventListener('pointerdown', event => {
    if (event.button) return;
    viewer.classList.add('held'); viewer.focus({preventScroll: true});
    event.preventDefault();
  });
  // On the window: a drag continues outside of the picture, and ends wherever the button is released.
  addEventListener('pointermove', event => {
    if (!viewer.classList.contains('held')) return;
    if (event.buttons) move(-event.movementX, -event.movementY); else viewer.classList.remove('held');
  });
  for (const end of ['pointerup', 'pointercancel']) addEventListener(end, () => viewer.classList.remove('held'));
  addEventListener('beforeprint', () => {
    svg.setAttribute('viewBox', whole);
    svg.style.cssText = 'max-width: 100%; height: auto';
  });
  addEventListener('afterprint', () => {
    if (!scale) return;
    svg.style.cssText = shown;
    draw();
  });
}
"""


BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "\u2212", "zoom out"),
    ("fit", "fit", "fit"),
    ("one", "1:1", "full size"),
)
CLASSES = {tokenize.STRING: "s", tokenize.NUMBER: "n", tokenize.COMMENT: "c"}


@dataclass(frozen=True)
class Tab:
    """A title of one or two words, and the HTML below it."""

    title: str
    body: str

    @property
    def name(self) -> str:
        """The fragment of the page's address."""
        return re.sub(r"\W+", "-", self.title.lower())


def page(title: str, subtitle: str, tabs: Sequence[Tab]) -> str:
    """Return the whole page."""
    links, sections = "", []
    for tab in tabs:
        links += f'<a role="tab" href="#{tab.name}" aria-controls="tab-{tab.name}">{escape(tab.title)}</a>'
        sections.append(f'<section id="tab-{tab.name}" role="tabpanel">\n{tab.body}\n</section>')
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p><nav role="tablist">{links}</nav></header>
<main>
{body}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Return a table of texts as HTML; the columns `numbers` are right-aligned."""
    # It may be a generator.
    right = set(numbers)

    def cell(index: int, text: str) -> str:
        return f'<td class="number">{_inline(text)}</td>' if index in right else f"<td>{_inline(text)}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for row in rows:
        cells = "".join(cell(i, text) for i, text in enumerate(row))
        body += f"<tr>{cells}</tr>\n"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Return large numbers with their names below."""
    inside = ""
    for value, what in pairs:
        inside += f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
    return f'<div class="tiles">{inside}</div>'


def folded(title: str, remark: str, body: str, is_open: bool = False) -> str:
    """Return a section that opens on a click."""
    head = f'<summary>{escape(title)} <span class="quiet">{escape(remark)}</span></summary>'
    return f"<details{' open' if is_open else ''}>{head}\n{body}\n</details>"


def source(html: str) -> str:
    """Return highlighted source with line numbers."""
    # Numbers have a separate column, so that copied code has none.
    lines = "\n".join(map(str, range(1, html.count("\n") + 1)))
    return f'<div class="source"><pre class="lines">{lines}</pre><pre><code>{html}</code></pre></div>'


def paragraph(text: str) -> str:
    return f"<p>{_inline(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def markdown_html(text: str) -> str:
    """Return the Markdown of `collectives.py` as HTML: headings, paragraphs, lists, tables, with blank lines between."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith("#"):
            level = len(lines[0]) - len(lines[0].lstrip("#"))
            blocks.append(f"<h{level + 1}>{escape(lines[0].lstrip('# '))}</h{level + 1}>")
            lines = lines[1:]
        if lines and lines[0].startswith("|"):
            cells = [_cells(line) for line in lines]
            blocks.append(table(cells[0], cells[2:]))
        elif lines and lines[0].startswith("- "):
            blocks.append("<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>")
        elif lines:
            blocks.append(paragraph(" ".join(lines)))
    return "\n".join(blocks)


def _cells(line: str) -> list[str]:
    # A bar in a cell has a backslash.
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def viewer(svg: str, name: str) -> str:
    """Return a picture with its buttons; a shadow root separates its styles and ids from the page's."""
    buttons = ""
    for value, text, label in BUTTONS:
        buttons += f'<button type="button" value="{value}" aria-label="{label}">{text}</button>'
    hint = "drag or arrow keys move, Ctrl + wheel or the keys + and - zoom, 0 fits"
    tools = f'<div class="tools">{buttons}<span class="quiet">{hint}</span></div>'
    inside = f'<div class="picture"><template shadowrootmode="open">{svg}</template></div>'
    return f'<div class="viewer" tabindex="0" role="group" aria-label="{escape(name)}">{tools}{inside}</div>'


def python_html(source: str) -> str:
    """Return source with colours as HTML; text that is not Python is only escaped."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return escape(source)
    # Offsets of the lines.
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    parts, done, before = [], 0, ""
    for token in tokens:
        kind = _class(token, before)
        # Text between tokens is escaped with the next one.
        if kind:
            begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            parts += [escape(source[done:begin]), f'<span class="{kind}">{escape(source[begin:end])}</span>']
            done = end
        before = token.string if token.string.strip() else before
    return "".join([*parts, escape(source[done:])])


def _class(token: tokenize.TokenInfo, before: str) -> str:
    if token.type == tokenize.NAME and keyword.iskeyword(token.string):
        return "k"
    if token.type == tokenize.NAME and before in ("def", "class"):
        return "d"
    return CLASSES.get(token.type, "")
