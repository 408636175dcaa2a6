"""Draw a pipeline schedule as a chart in SVG: one row per pipeline rank, one box per forward, backward and W.

In: per rank the computations with start and end, as a simulation or a measured run gives them. Out: the text of an SVG
file, the same bytes for the same input. Boxes carry the microbatch; forwards are blue, backwards green, weight gradients
that run on their own (W) orange, and the shade is the model chunk, dark for the first and light for the last (Narayanan
et al., SC'21, figure 4). Grey is idle time: the bubble.

    result = simulate(interleaved(p=2, v=2, m=8))
    text = schedule_svg(result.spans, title="interleaved, p=2 v=2 m=8", bubble=result.bubble)
    Path("schedule.svg").write_text(text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from autoptd.ir.actions import Action, Kind

Spans = Sequence[Sequence[tuple[Action, float, float]]]  # per rank: what, start, end

LEFT, RIGHT, TOP, ROW, GAP, BELOW = 76, 78, 66, 30, 6, 52  # margins and row height, in pixels
BOX_WIDTH = 24  # wanted for the shortest box ...
MIN_WIDTH, MAX_WIDTH = 560, 2600  # ... unless the chart gets narrower or wider than this
DARK = {Kind.F: (31, 83, 160), Kind.B: (28, 112, 62), Kind.W: (163, 84, 18)}
LIGHT = {Kind.F: (176, 208, 246), Kind.B: (176, 226, 190), Kind.W: (247, 210, 168)}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradient"}
STYLE = """
  text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #333 }
  .title { font-size: 16px; font-weight: bold }
  .rank { text-anchor: end }
  .tick { text-anchor: middle; font-size: 11px; fill: #666 }
  .box rect { stroke: #fff; stroke-width: 1 }
  .box text { text-anchor: middle }
  .on-dark { fill: #fff }
  .idle { fill: #e9e9ec }
  .axis { stroke: #999; stroke-width: 1 }
"""


def schedule_svg(
    spans: Spans,
    *,
    title: str = "",
    bubble: float | None = None,
    peak_live: Sequence[int] = (),
    unit: str = "time (one forward = 1)",
) -> str:
    """Return the chart of `spans` as SVG text.

    `bubble` (idle share over ideal time) goes into the title, `peak_live` (live microbatches, per rank) behind the
    rows, `unit` under the time axis.
    """
    scale = _scale(spans)
    heading = title + ("" if bubble is None else f"{', ' if title else ''}bubble {_number(100 * bubble)} %")
    body = [f'<text class="title" x="12" y="26">{escape(heading)}</text>']
    body += _legend(scale, {action.kind for row in spans for action, _, _ in row})
    body += _live_column(scale, peak_live) if peak_live else []
    for rank, row in enumerate(spans):
        body += _row(rank, row, scale)
    body += _axis(scale, unit)
    size = f'width="{scale.total_width}" height="{scale.total_height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {scale.total_width} {scale.total_height}">'
    back = f'<rect width="{scale.total_width}" height="{scale.total_height}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *body, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Scale:
    """How time and ranks become pixels."""

    pixels: float  # per unit of time
    finish: float
    ranks: int
    chunks: int

    @property
    def total_width(self) -> int:
        return ceil(self.x(self.finish)) + RIGHT

    @property
    def bottom(self) -> int:
        return TOP + self.ranks * (ROW + GAP)

    @property
    def total_height(self) -> int:
        return self.bottom + BELOW

    def x(self, time: float) -> float:
        return LEFT + time * self.pixels

    def y(self, rank: int) -> int:
        return TOP + rank * (ROW + GAP)


def _scale(spans: Spans) -> _Scale:
    finish = max((end for row in spans for _, _, end in row), default=1.0)
    shortest = min((end - start for row in spans for _, start, end in row if end > start), default=finish)
    width = min(max(finish / shortest * BOX_WIDTH, MIN_WIDTH), MAX_WIDTH)
    stages = 1 + max((action.stage for row in spans for action, _, _ in row), default=0)
    return _Scale(width / finish, finish, len(spans), ceil(stages / max(len(spans), 1)))


def _row(rank: int, row: Sequence[tuple[Action, float, float]], scale: _Scale) -> list[str]:
    y = scale.y(rank)
    lines = [f'<text class="rank" x="{LEFT - 10}" y="{y + ROW // 2 + 4}">pp rank {rank}</text>']
    lines.append(
        f'<rect class="idle" x="{LEFT}" y="{y}" width="{_number(scale.finish * scale.pixels)}" height="{ROW}"/>'
    )
    for action, start, end in row:
        color, is_dark = _shade(action.kind, action.stage // scale.ranks, scale.chunks)
        left, width = scale.x(start), (end - start) * scale.pixels
        hint = f"<title>{action}: {_number(start)} to {_number(end)}</title>"
        box = f'<rect x="{_number(left)}" y="{y}" width="{_number(width)}" height="{ROW}" fill="{color}"/>'
        label = _label(str(action.microbatch), left + width / 2, y + ROW // 2 + 4, width, is_dark)
        lines.append(f'<g class="box">{hint}{box}{label}</g>')
    return lines


def _label(text: str, x: float, y: float, width: float, is_dark: bool) -> str:
    """Return the microbatch number in a box, smaller where it is tight and left out where it cannot be read."""
    size = min(12.0, floor(10 * (width - 2) / (0.58 * len(text))) / 10)
    if size < 6:
        return ""
    small = "" if size == 12 else f' style="font-size: {_number(size)}px"'
    css = ' class="on-dark"' if is_dark else ""
    return f'<text{css} x="{_number(x)}" y="{_number(y)}"{small}>{text}</text>'


def _legend(scale: _Scale, kinds: set[Kind]) -> list[str]:
    """Return a swatch per kind and chunk: the first four chunks and the last. W is told where there is one."""
    chunks = [chunk for chunk in range(scale.chunks) if chunk < 4 or chunk == scale.chunks - 1]
    lines, x = [], 12
    for kind in (Kind.F, Kind.B, *({Kind.W} & kinds)):
        for chunk in chunks:
            lines.append(f'<rect x="{x}" y="38" width="14" height="14" fill="{_shade(kind, chunk, scale.chunks)[0]}"/>')
            x += 16
        of_chunks = f" (chunks 0 to {scale.chunks - 1})" if scale.chunks > 1 else ""
        lines.append(f'<text x="{x + 4}" y="50">{NAMES[kind]}{of_chunks}</text>')
        x += 26 + 7 * len(NAMES[kind]) + 6 * len(of_chunks)
    lines.append(f'<rect class="idle" x="{x}" y="38" width="14" height="14"/>')
    lines.append(f'<text x="{x + 20}" y="50">idle; numbers are microbatches</text>')
    return lines


def _live_column(scale: _Scale, peak_live: Sequence[int]) -> list[str]:
    x = scale.total_width - RIGHT + 10
    lines = [f'<text class="tick" x="{x + 26}" y="{TOP - 8}">peak live</text>']
    for rank, live in enumerate(peak_live):
        lines.append(f'<text class="tick" x="{x + 26}" y="{scale.y(rank) + ROW // 2 + 4}">{live}</text>')
    return lines


def _axis(scale: _Scale, unit: str) -> list[str]:
    y = scale.bottom + 2
    lines = [f'<path class="axis" d="M{LEFT} {y}H{_number(scale.x(scale.finish))}"/>']
    step = _tick_step(scale.finish, wanted=max(2, int(scale.finish * scale.pixels / 90)))
    for tick in range(floor(scale.finish / step + 1e-9) + 1):
        x = _number(scale.x(tick * step))
        lines.append(f'<path class="axis" d="M{x} {y}v5"/><text class="tick" x="{x}" y="{y + 18}">')
        lines[-1] += f"{_number(tick * step)}</text>"
    middle = _number(scale.x(scale.finish / 2))
    return [*lines, f'<text class="tick" x="{middle}" y="{y + 38}">{escape(unit)}</text>']


def _tick_step(finish: float, wanted: int) -> float:
    """Return 1, 2 or 5 times a power of ten: the smallest that gives at most `wanted` steps."""
    power = 10.0 ** floor(log10(finish / wanted))
    return next((factor * power for factor in (1, 2, 5) if factor * power * wanted >= finish), 10 * power)


def _shade(kind: Kind, chunk: int, chunks: int) -> tuple[str, bool]:
    """Return the colour of a box and whether it is dark, so that its text must be light."""
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    rgb = [round(dark + share * (light - dark)) for dark, light in zip(DARK[kind], LIGHT[kind], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in rgb), share < 0.5


def _number(value: float) -> str:
    """At most two decimals, or three significant digits of something small; no trailing zeros."""
    text = f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
