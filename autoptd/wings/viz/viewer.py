"""A picture in a page that can be zoomed, moved and fitted, by mouse, buttons and keys.

In: the text of an SVG. Out: HTML; `STYLE` and `SCRIPT` go once into the page that holds it. Without JavaScript
the picture scrolls, and the buttons are not shown; in print it is whole.

    viewer('<svg viewBox="0 0 800 600" ...>...</svg>', "the stages")
"""

from __future__ import annotations

from html import escape

STYLE = """
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
# `scale` is screen pixels per pixel of the picture; (`left`, `top`) is the point of it in the corner of its window.
SCRIPT = """
for (const viewer of document.querySelectorAll('.viewer')) {
  const host = viewer.querySelector('.picture'), svg = host.shadowRoot && host.shadowRoot.querySelector('svg');
  if (!svg) continue;
  const {width, height} = svg.viewBox.baseVal, whole = svg.getAttribute('viewBox');
  const shown = 'display: block; width: 100%; height: 100%';
  let scale = 0, left = 0, top = 0;
  // The picture cannot be lost: what is smaller than its window is centred, of the rest the window shows no outside.
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
  // A picture in a tab or section that is closed has no size: it starts when it is first seen, as wide as its window.
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
  // In a frame of its own: it changes the size that is observed.
  new ResizeObserver(() => requestAnimationFrame(begin)).observe(host);
  for (const button of viewer.querySelectorAll('button')) button.addEventListener('click', () => actions[button.value]());
  viewer.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys[event.key]) actions[keys[event.key]](); else if (steps[event.key]) move(...steps[event.key]); else return;
    event.preventDefault();
  });
  // Without the key, and unless the picture was clicked before, the wheel scrolls the page.
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
  // On the window: a drag goes on outside of the picture, and ends wherever the button is let go.
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


def viewer(svg: str, name: str) -> str:
    """Return a picture with its buttons, the SVG in a shadow root: its styles and ids are its own."""
    # Values are the names of the script's actions.
    buttons = ""
    for value, text, label in BUTTONS:
        buttons += f'<button type="button" value="{value}" aria-label="{label}">{text}</button>'
    hint = "drag or arrow keys move, Ctrl + wheel or the keys + and - zoom, 0 fits"
    tools = f'<div class="tools">{buttons}<span class="quiet">{hint}</span></div>'
    inside = f'<div class="picture"><template shadowrootmode="open">{svg}</template></div>'
    return f'<div class="viewer" tabindex="0" role="group" aria-label="{escape(name)}">{tools}{inside}</div>'


__all__ = ["SCRIPT", "STYLE", "viewer"]
