"""Draw the schedule: a row per pipeline rank, a box per action, time to the right.

In: one or more `Run`s of a step (simulated, executed). Out: the text of an SVG file, the same bytes for the
same input. Boxes have the number of the microbatch; forwards are blue, backwards green (hatched: recomputation),
separate weight gradients (W) orange, and the shade is the model chunk, dark for the first and light for the last
(Narayanan et al., SC'21, figure 4). Grey is idle time: the bubble. Thin lines are messages. The strip below a row is
the memory that its rank holds for backward.

Only the first and last of many ranks are drawn, and the beginning and end of a long step; the picture says so.

    text = schedule_svg([Run("simulated", result.spans)], program.orders, title="interleaved, p=2 v=2 m=8")
    Path("schedule.svg").write_text(text)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log10
from statistics import median
from xml.sax.saxutils import escape

from autoptd.ir.actions import COMPUTES, Action, Kind
from autoptd.wings.viz.colours import dark_rules
from autoptd.wings.viz.runs import Curve, Message, Run, Span, meaning
from autoptd.wings.words import bytes_text

# Margins and heights, in pixels.
LEFT, RIGHT, HEAD, ROW, STRIP, GAP, AXIS = 84, 110, 92, 28, 24, 10, 56
# Pixels of a usual box: the goal, and the least that can be read.
BOX_WIDTH, MIN_BOX_WIDTH = 24.0, 9.0
# Pixels of the time axis.
MIN_WIDTH, MAX_WIDTH = 640.0, 2400.0
MAX_RANKS, MAX_MESSAGES = 16, 600
DARK = {Kind.F: (31, 83, 160), Kind.B: (28, 112, 62), Kind.W: (163, 84, 18)}
LIGHT = {Kind.F: (176, 208, 246), Kind.B: (176, 226, 190), Kind.W: (247, 210, 168)}
# Recomputation in backward.
HATCH = """<defs><pattern id="again" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2" height="5" fill="#fff" fill-opacity="0.55"/></pattern></defs>"""
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
STYLE = """
  text { font-family: Verdana, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 11px; fill: #26303b }
  .title { font-size: 16px; font-weight: bold }
  .panel { font-size: 13px; font-weight: bold }
  .rank { text-anchor: end }
  .tick { text-anchor: middle; font-size: 10px; fill: #6b7682 }
  .quiet { fill: #6b7682; font-size: 10px }
  .box rect { stroke: #fff; stroke-width: 0.7 }
  .box text { text-anchor: middle; fill: #26303b }
  .box .on-dark { fill: #fff }
  .idle { fill: #e4e6ea }
  .strip { fill: #f4f5f7 }
  .held { fill: #c9b3e6 }
  .axis { stroke: #9aa4ae; stroke-width: 1; fill: none }
  .sent { stroke-width: 1; stroke-opacity: 0.65; fill: none }
  .cut { fill: #fff; stroke: #9aa4ae; stroke-dasharray: 3 3 }
"""
# For dark screens; boxes and their text keep their colours.
DARK_STYLE = (
    "text { fill: #dde3ea } .box text { fill: #26303b } .box .on-dark { fill: #fff } .tick, .quiet { fill: #a6b1bc }",
    ".box rect { stroke: #12171d } .idle { fill: #2a323b } .strip { fill: #1a2129 } .held { fill: #6f559c }",
    ".axis { stroke: #6b7682 } .cut { fill: #12171d; stroke: #6b7682 } .sent { stroke-opacity: 1 }",
)


def schedule_svg(runs: Sequence[Run], orders: Sequence[Sequence[Action]] = (), *, title: str = "") -> str:
    """Return the chart of `runs`, one panel below the other, as SVG text, with the messages of `orders`."""
    # All panels have the width of the widest, and their own time scales.
    width = max((_wanted_width(run) for run in runs), default=MIN_WIDTH)
    panels = [_Panel(run, _Scale.of(run, width), orders) for run in runs]
    right = max((ceil(panel.scale.right) for panel in panels), default=0) + RIGHT
    body, y = [f'<text class="title" x="12" y="26">{escape(title)}</text>', *_legend(panels)], float(HEAD)
    for panel in panels:
        body += [f'<g transform="translate(0 {_n(y)})">', *panel.draw(), "</g>"]
        y += panel.height
    height = ceil(y)
    size = f'width="{right}" height="{height}" viewBox="0 0 {right} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    if any(any(run.again) for run in runs):
        body.insert(0, HATCH)
    drawn = "\n".join([f'<rect width="{right}" height="{height}" fill="#fff"/>', *body])
    return "\n".join([head, f"<style>{STYLE}{dark_rules(drawn, DARK_STYLE)}</style>", drawn, "</svg>"]) + "\n"


def _usual(run: Run) -> float:
    """Return the median time of a computation: a stage with the head is longer, and recording adds outliers."""
    lengths = []
    for row in run.spans:
        lengths += [end - start for action, start, end in row if action.kind in COMPUTES and end > start]
    return median(lengths) if lengths else run.length


def _wanted_width(run: Run) -> float:
    return min(max(run.length / _usual(run) * BOX_WIDTH, MIN_WIDTH), MAX_WIDTH)


@dataclass(frozen=True)
class _Scale:
    """The scale of time: `windows` are the parts of the step that are drawn, each (from, to)."""

    # Per unit of time.
    pixels: float
    windows: tuple[tuple[float, float], ...]

    @staticmethod
    def of(run: Run, width: float) -> _Scale:
        """Return the scale of the whole step if its boxes can be distinguished, else of its beginning and end."""
        usual = _usual(run)
        if run.length / usual * MIN_BOX_WIDTH <= MAX_WIDTH:
            return _Scale(width / run.length, ((run.begin, run.end),))
        # Boxes stay readable, and the middle of a long step is left out.
        pixels = 1.5 * MIN_BOX_WIDTH / usual
        half = width / 2 / pixels
        return _Scale(pixels, ((run.begin, run.begin + half), (run.end - half, run.end)))

    @property
    def right(self) -> float:
        return self.x(self.windows[-1][1])

    def x(self, time: float) -> float:
        """Return the place of a moment, or of the nearest one that is drawn."""
        gap = GAP if len(self.windows) > 1 else 0
        left = float(LEFT)
        for low, high in self.windows:
            if time <= high:
                return left + max(time - low, 0.0) * self.pixels
            left += (high - low) * self.pixels + gap
        return left - gap

    def shown(self, start: float, end: float) -> bool:
        """Tell whether any part of an interval is drawn."""
        return any(start < high and end > low for low, high in self.windows)


@dataclass(frozen=True)
class _Panel:
    """One run, drawn from its top left corner on."""

    run: Run
    scale: _Scale
    orders: Sequence[Sequence[Action]]

    @property
    def ranks(self) -> list[int]:
        """The ranks that are drawn."""
        count = len(self.run.spans)
        # The bubble is at both ends of a pipeline.
        if count <= MAX_RANKS:
            return list(range(count))
        return [*range(MAX_RANKS // 2), *range(count - MAX_RANKS // 2, count)]

    @property
    def step(self) -> int:
        """From row to row."""
        return ROW + GAP + (STRIP if self.run.memory else 0)

    @property
    def height(self) -> float:
        return self._y(len(self.ranks) - 1) + self.step + AXIS

    def draw(self) -> Iterator[str]:
        run, ranks = self.run, self.ranks
        facts = []
        if run.in_seconds:
            facts.append(f"{_n(run.length * run.scale)} {run.unit}")
        if run.is_whole:
            facts.append(f"bubble {100 * run.bubble:.1f} %")
        yield f'<text class="panel" x="12" y="4">{escape(run.name)}: {", ".join(facts)}</text>'
        messages = self.messages
        remarks = [text for text in (run.remark, *self._left_out(len(messages))) if text]
        yield f'<text class="quiet" x="12" y="20">{escape("; ".join(remarks))}</text>'
        yield f'<text class="quiet" x="{_n(self.scale.right + 12)}" y="20">idle, most held</text>'
        top = max((amount for curve in run.memory for _, amount in curve), default=0.0)
        for i, rank in enumerate(ranks):
            yield from self._row(self._y(i), rank, top)
        if self.has_messages:
            row = {rank: i for i, rank in enumerate(ranks)}
            yield from (self._message(message, row) for message in messages)
        for i, rank in enumerate(ranks):
            yield from self._boxes(self._y(i), rank)
        yield from self._breaks()
        yield from self._axis()

    @cached_property
    def messages(self) -> list[Message]:
        """The messages between ranks and in intervals that are drawn."""
        # A message may take no time.
        moment = 1e-9 * self.run.length
        messages = []
        for message in self.run.messages(self.orders, self.ranks) if self.orders else ():
            if self.scale.shown(message.sent, message.read + moment):
                messages.append(message)
        return messages

    @property
    def has_messages(self) -> bool:
        """Whether messages are drawn: not if they are too many."""
        return 0 < len(self.messages) <= MAX_MESSAGES

    def _y(self, row: int) -> float:
        """Return the top of a row; omitted rows leave a gap."""
        is_below_gap = len(self.run.spans) > MAX_RANKS and row >= MAX_RANKS // 2
        return 30 + row * self.step + (GAP if is_below_gap else 0)

    def _left_out(self, messages: int) -> Iterator[str]:
        """Yield descriptions of parts that are not drawn."""
        run = self.run
        if len(run.spans) > MAX_RANKS:
            yield f"ranks {MAX_RANKS // 2} to {len(run.spans) - MAX_RANKS // 2 - 1} are not drawn"
        if len(self.scale.windows) > 1:
            (_, first), (second, _) = self.scale.windows
            share = 100 * (second - first) / run.length
            times = f"{_n((first - run.begin) * run.scale)} to {_n((second - run.begin) * run.scale)}"
            yield f"{share:.0f} % of the time, from {times}, is left out"
        if messages > MAX_MESSAGES:
            yield f"its {messages} messages are not drawn"

    def _row(self, y: float, rank: int, top: float) -> Iterator[str]:
        run, scale = self.run, self.scale
        yield f'<text class="rank" x="{LEFT - 10}" y="{_n(y + ROW / 2 + 4)}">pp rank {rank}</text>'
        for low, high in scale.windows if run.spans[rank] else ():
            width = _n((high - low) * scale.pixels)
            yield f'<rect class="idle" x="{_n(scale.x(low))}" y="{_n(y)}" width="{width}" height="{ROW}"/>'
        at = _n(scale.right + 12)
        idle = f"{100 * run.idle[rank]:.0f} % idle" if run.spans[rank] else "not recorded"
        yield f'<text x="{at}" y="{_n(y + ROW / 2 + 4)}">{idle}</text>'
        if run.memory:
            yield from self._strip(y + ROW + 2, run.memory[rank], top)
            most = max((amount for _, amount in run.memory[rank]), default=0.0)
            text = bytes_text(most) if run.in_bytes else f"{most:g} live"
            yield f'<text class="quiet" x="{at}" y="{_n(y + ROW + STRIP - 2)}">{text}</text>'

    def _boxes(self, y: float, rank: int) -> Iterator[str]:
        for span in self.run.spans[rank]:
            if span[0].kind in COMPUTES and self.scale.shown(span[1], span[2]):
                yield self._box(y, span)

    def _box(self, y: float, span: Span) -> str:
        action, start, end = span
        run, scale = self.run, self.scale
        color, is_dark = _shade(action.kind, run.chunks[action.stage], self.chunks)
        left, right = scale.x(start), scale.x(end)
        times = f"{_n((start - run.begin) * run.scale)} to {_n((end - run.begin) * run.scale)} {run.unit}"
        hint = f"<title>{action}: {meaning(action)}; {times}</title>"
        # At least a line.
        width = _n(max(right - left, 0.5))
        box = f'<rect x="{_n(left)}" y="{_n(y)}" width="{width}" height="{ROW}" fill="{color}"/>'
        again = run.again[action.stage] * scale.pixels if run.again and action.kind is Kind.B else 0.0
        if again:
            size = f'width="{_n(min(again, right - left))}" height="{ROW}"'
            box += f'<rect x="{_n(left)}" y="{_n(y)}" {size} fill="url(#again)"/>'
        label = _label(str(action.microbatch), (left + right) / 2, y + ROW / 2 + 4, right - left, is_dark)
        return f'<g class="box">{hint}{box}{label}</g>'

    @property
    def chunks(self) -> int:
        """Model chunks of a rank."""
        return 1 + max(self.run.chunks.values(), default=0)

    def _message(self, message: Message, row: dict[int, int]) -> str:
        """Draw a line between the rows, below the boxes."""
        # From edge to edge: lines do not cross the boxes at their ends.
        is_down = row[message.target] > row[message.source]
        x, y = self.scale.x(message.sent), self._y(row[message.source]) + ROW * is_down
        to_x, to_y = self.scale.x(message.read), self._y(row[message.target]) + ROW * (not is_down)
        color = "#1f53a0" if message.action.kind is Kind.SEND_F else "#1c703e"
        return (
            f'<path class="sent" stroke="{color}" d="M{_n(x)} {_n(y)}L{_n(to_x)} {_n(to_y)}">'
            f"<title>{message.action}</title></path>"
        )

    def _strip(self, y: float, curve: Curve, top: float) -> Iterator[str]:
        """Draw the memory of a rank over time as an area; `top` is the maximum over all ranks."""
        times, high = [time for time, _ in curve], STRIP - 4
        for low, end in self.scale.windows:
            # At the left edge, the step function has the value of the last change before.
            first = bisect_right(times, low)
            held = curve[first - 1][1] if first else 0.0
            left, bottom = self.scale.x(low), y + high
            path = [f"M{_n(left)} {_n(bottom)}V{_n(bottom - high * held / top if top else bottom)}"]
            for time, amount in curve[first : bisect_right(times, end)]:
                path.append(
                    f"H{_n(self.scale.x(time))}V{_n(bottom - high * amount / top if top else bottom)}"
                )
            right = _n(left + (end - low) * self.scale.pixels)
            width = _n((end - low) * self.scale.pixels)
            yield f'<rect class="strip" x="{_n(left)}" y="{_n(y)}" width="{width}" height="{high}"/>'
            yield f'<path class="held" d="{"".join(path)}H{right}V{_n(bottom)}Z"/>'

    def _breaks(self) -> Iterator[str]:
        """Draw the gap of the omitted time."""
        if len(self.scale.windows) > 1:
            x, bottom = self.scale.x(self.scale.windows[0][1]), self._y(len(self.ranks) - 1) + self.step
            yield f'<rect class="cut" x="{_n(x + 1)}" y="28" width="{GAP - 2}" height="{_n(bottom - 26)}"/>'

    def _axis(self) -> Iterator[str]:
        run, scale = self.run, self.scale
        y = self._y(len(self.ranks) - 1) + self.step
        drawn = sum(high - low for low, high in scale.windows)
        step = _tick_step(drawn * run.scale, wanted=max(2, int(drawn * scale.pixels / 90))) / run.scale
        for low, high in scale.windows:
            yield f'<path class="axis" d="M{_n(scale.x(low))} {_n(y)}H{_n(scale.x(high))}"/>'
            first = ceil((low - run.begin) / step - 1e-9)
            for tick in range(first, floor((high - run.begin) / step + 1e-9) + 1):
                x = _n(scale.x(run.begin + tick * step))
                yield f'<path class="axis" d="M{x} {_n(y)}v5"/>'
                yield f'<text class="tick" x="{x}" y="{_n(y + 17)}">{_n(tick * step * run.scale)}</text>'
        middle = _n((LEFT + scale.right) / 2)
        yield f'<text class="tick" x="{middle}" y="{_n(y + 31)}">{escape(f"time ({run.unit})")}</text>'


def _legend(panels: Sequence[_Panel]) -> Iterator[str]:
    """Draw a swatch per kind and chunk (the first four and the last); W only where it occurs."""
    kinds = set().union(*(panel.run.kinds for panel in panels)) if panels else set()
    chunks = max((panel.chunks for panel in panels), default=1)
    shown = [chunk for chunk in range(chunks) if chunk < 4 or chunk == chunks - 1]
    x = 12.0
    for kind in (Kind.F, Kind.B, *({Kind.W} & kinds)):
        for chunk in shown:
            yield f'<rect x="{_n(x)}" y="42" width="14" height="14" fill="{_shade(kind, chunk, chunks)[0]}"/>'
            x += 16
        text = NAMES[kind] + (f" (chunks 0 to {chunks - 1})" if chunks > 1 else "")
        yield f'<text x="{_n(x + 4)}" y="53">{text}</text>'
        x += 24 + 7 * len(text)
    yield f'<rect class="idle" x="{_n(x)}" y="42" width="14" height="14"/>'
    text = "idle; numbers are microbatches"
    yield f'<text x="{_n(x + 20)}" y="53">{text}</text>'
    x += 40 + 7 * len(text)
    if any(panel.has_messages for panel in panels):
        yield f'<path class="sent" stroke="#1f53a0" d="M{_n(x)} 55L{_n(x + 16)} 43"/>'
        yield f'<text x="{_n(x + 22)}" y="53">message</text>'
        x += 90
    if any(panel.run.memory for panel in panels):
        yield f'<rect class="held" x="{_n(x)}" y="42" width="14" height="14"/>'
        yield f'<text x="{_n(x + 20)}" y="53">held for backward</text>'
        x += 150
    if any(any(panel.run.again) for panel in panels):
        yield f'<rect x="{_n(x)}" y="42" width="14" height="14" fill="{_shade(Kind.B, 0, 1)[0]}"/>'
        yield f'<rect x="{_n(x)}" y="42" width="14" height="14" fill="url(#again)"/>'
        yield f'<text x="{_n(x + 20)}" y="53">recomputed</text>'


def _label(text: str, x: float, y: float, width: float, is_dark: bool) -> str:
    """Return the number of the microbatch in a box, smaller if it is tight, none if it would not be readable."""
    size = min(11.0, floor(10 * (width - 2) / (0.64 * len(text))) / 10)
    if size < 6:
        return ""
    small = "" if size == 11 else f' style="font-size: {_n(size)}px"'
    css = ' class="on-dark"' if is_dark else ""
    return f'<text{css} x="{_n(x)}" y="{_n(y)}"{small}>{text}</text>'


def _tick_step(finish: float, wanted: int) -> float:
    """Return 1, 2 or 5 times a power of ten: the smallest that gives at most `wanted` steps."""
    power = 10.0 ** floor(log10(finish / wanted))
    return next((factor * power for factor in (1, 2, 5) if factor * power * wanted >= finish), 10 * power)


def _shade(kind: Kind, chunk: int, chunks: int) -> tuple[str, bool]:
    """Return the colour of a box and whether it is dark, so that its text must be light."""
    # Dark to light as in the paper; the text follows.
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    rgb = [round(dark + share * (light - dark)) for dark, light in zip(DARK[kind], LIGHT[kind], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in rgb), share < 0.5


def _n(value: float) -> str:
    """Format with at most two decimals, or three significant digits of something small; no trailing zeros."""
    text = f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
