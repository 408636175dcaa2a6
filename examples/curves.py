"""Compare two loss curves, in words and as a picture.

In: the losses of two runs, one number per step. Out: the differences that are too large, and an SVG.

    find_faults([5.0, 3.0], [5.0, 3.1], entropy=3.2)        # ["the curves part at step 1: ..."]
"""

from __future__ import annotations

import math

TOLERANCE = 1e-3
# For computation in 16 bits: 1% of the loss
WIDE = 1e-2
WIDTH, HEIGHT, MARGIN = 640, 360, 48
STROKES = (
    ("#f0b040", 6),
    ("#2050a0", 2),
)  # the second curve is drawn over the first one, and both stay visible


def find_faults(
    single: list[float], parallel: list[float], entropy: float, precision: str | None = None
) -> list[str]:
    """Return the faults of the two curves, in words; an empty list if there are none. NaN is a fault."""
    if len(single) != len(parallel):
        return [f"{len(single)} steps on one device, {len(parallel)} in parallel"]
    faults = []
    apart = []
    for step, (a, b) in enumerate(zip(single, parallel, strict=True)):
        if not abs(a - b) <= (WIDE * a if precision else TOLERANCE):
            apart.append(step)
    if apart:
        a, b = single[apart[0]], parallel[apart[0]]
        faults.append(f"the curves part at step {apart[0]}: {a:.6f} on one device, {b:.6f} in parallel")
    if not parallel[-1] < entropy:
        faults.append(f"final loss {parallel[-1]:.3f} is not below the text's unigram entropy {entropy:.3f}")
    return faults


def draw(single: list[float], parallel: list[float], entropy: float) -> str:
    """Return an SVG of both curves over the steps, with the entropy as a dashed line."""
    known = [loss for loss in [*single, *parallel, entropy] if math.isfinite(loss)]
    low, high, last = min(known), max(known), max(len(single), len(parallel), 2) - 1

    def place(step: int, loss: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        return round(x, 1), round(
            HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / (high - low or 1), 1
        )

    def line(points: list[tuple[float, float]], stroke: str) -> str:
        return f'<polyline points="{" ".join(f"{x},{y}" for x, y in points)}" fill="none" {stroke}/>'

    def text(x: float, y: float, words: str, color: str = "gray") -> str:
        quiet = ' class="quiet"' if color == "gray" else ""
        return f'<text{quiet} x="{x}" y="{y}" fill="{color}" font-family="sans-serif" font-size="13">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        # Like the other pictures, it follows dark mode.
        "<style>@media screen and (prefers-color-scheme: dark) { rect { fill: #12171d } .quiet { fill: #a6b1bc }",
        "  text[fill='#2050a0'] { fill: #79aff2 } polyline[stroke='#2050a0'] { stroke: #79aff2 } }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        line([place(0, entropy), place(last, entropy)], 'stroke="gray" stroke-dasharray="4"'),
        text(WIDTH - 340, MARGIN + 40, f"unigram entropy of the text: {entropy:.4f}"),
        text(WIDTH / 2 - 90, HEIGHT - 16, f"loss in nats, steps 0 to {last}"),
        *(text(8, place(0, loss)[1], f"{loss:.2f}") for loss in (low, high)),
    ]
    runs = (("one device", single), ("in parallel", parallel))
    for row, ((name, curve), (color, thick)) in enumerate(zip(runs, STROKES, strict=True)):
        points = [place(step, loss) for step, loss in enumerate(curve) if math.isfinite(loss)]
        parts.append(line(points, f'stroke="{color}" stroke-width="{thick}"'))
        parts.append(text(WIDTH - 340, MARGIN + 20 * row, f"{name}: {curve[-1]:.4f}", color))
    return "\n".join([*parts, "</svg>"]) + "\n"
