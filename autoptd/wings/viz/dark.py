"""Colours of the dark: rules that a picture carries, so that it follows the reader's settings.

In: the text of a picture whose colours are attributes (`fill="#bcd4f5"`). Out: a style sheet in a media query
that replaces those that occur. What knows no style sheets, or prints, shows the attributes.

    dark_rules('<rect fill="#bcd4f5"/>')    # '@media screen and (prefers-color-scheme: dark) {...}'
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoptd.wings.viz import colours, scene

PAPER, INK, QUIET = "#12171d", "#dde3ea", "#a6b1bc"
# Grounds: dark shades of the light ones, on which light text can be read.
FILLS = {
    "#ffffff": "#1a2129",
    "#fff": PAPER,
    colours.COLUMN: "#24456f",
    colours.ROW: "#654618",
    colours.WHOLE: "#6d2e2e",
    colours.VOCABULARY: "#483770",
    colours.SPLIT: "#1f2e42",
    colours.SMALL: "#212932",
    colours.FOLDED: "#303943",
    colours.INPUT: "#2f2d1c",
    colours.RECEIVED: "#14303b",
    colours.APART: "#161c23",
    colours.RANKS[0]: "#171e26",
    colours.RANKS[1]: "#18211a",
    colours.RANKS[2]: "#211a23",
    colours.RANKS[3]: "#17232b",
    colours.SEVERAL: "#191f26",
}
# Borders and links: light shades, which stand out from dark grounds.
STROKES = {
    scene.INK: "#c3ccd5",
    colours.BORDER: "#5f6b77",
    colours.PART_BORDER: "#3c4650",
    colours.EDGES["I"]: "#aeb9c4",
    colours.EDGES["P"]: "#f0a04b",
    colours.EDGES["S"]: "#79aff2",
    colours.SENT: "#5cbfdb",
    colours.TIED: "#d192cd",
    colours.KINDS["all-reduce"]: "#e8716c",
    colours.KINDS["all-gather"]: "#ad91f2",
    colours.KINDS["reduce-scatter"]: "#46bf93",
    colours.KINDS["all-to-all"]: "#de83c3",
    # Messages of the schedule chart, forward and backward.
    "#1f53a0": "#79aff2",
    "#1c703e": "#6fbf8c",
}
TEXT = (f"text {{ fill: {INK} }} .quiet, .subtitle {{ fill: {QUIET} }} .on-bar {{ fill: #fff }}",)


def dark_rules(drawn: str, text: Sequence[str] = TEXT) -> str:
    """Return the style sheet of a picture for dark screens; `text` are its rules for classes."""
    rules = list(text)
    fills, strokes = (set(re.findall(rf'{name}="(#\w+)"', drawn)) for name in ("fill", "stroke"))
    rules += [f'[fill="{light}"] {{ fill: {dark} }}' for light, dark in FILLS.items() if light in fills]
    # The ground of a frame lies around its heading, too.
    rules += [f'[stroke="{light}"] {{ stroke: {dark} }}' for light, dark in FILLS.items() if light in strokes]
    for light, dark in STROKES.items():
        if light in strokes:
            rules.append(f'[stroke="{light}"] {{ stroke: {dark} }}')
        # Arrow heads and letters are filled with the colour of their link; bars keep theirs.
        if light in fills:
            rules.append(f'polygon[fill="{light}"], tspan[fill="{light}"] {{ fill: {dark} }}')
    inside = "\n".join(f"    {rule}" for rule in rules)
    return f"  @media screen and (prefers-color-scheme: dark) {{\n{inside}\n  }}\n"


__all__ = ["dark_rules"]
