"""What a machine measured, out of a text: two texts of one kind are then equal, whatever numbers a CPU or its load gave.

same_words("1.39 k tokens/s  compute 20%")      # "# tokens/s compute #%"
"""

from __future__ import annotations

import re

# As Python prints them: 0e+00, -1.5, 1e+02, 1,234, inf, nan. Digits of a name (F1.2, RECV_F1.2<0, v1) are no number.
NUMBER = r"(?<![\w.])(?<!\w<)[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)(?!\w|\.\d)"
# A number of these has another prefix where it is larger: 640 B, 1.2 GiB; 930 tokens/s, 1.39 k tokens/s; 730 us, 1.1 ms.
UNITS = rf"{NUMBER} ?(?:[kMGTP]i?|[um])? ?(?=(?:B|B/s|FLOP/s|tokens/s|s)(?![\w/]))"


def same_words(text: str) -> str:
    """Return a text with `#` for every number, whatever its unit's prefix, and single spaces."""
    # Which parameter differs most is measured too.
    text = re.sub(r"at [\w.]+, step", "at NAME, step", text)
    text = re.sub(UNITS, "# ", text)
    return " ".join(re.sub(NUMBER, "#", text).split())


def same_table(text: str) -> list[str]:
    """Return the lines of a doctor's report but for what each run and machine has of its own: names, times, speeds."""
    for pattern, word in (
        (r"on \S+: gloo, CPU, .* free; .*", "on HOST"),
        # Which ranks were slowest, of a column at the end of the line.
        (r"\d(, | > )\d$", "RANKS"),
        (rf"{UNITS}(B/s|s)\b", r"# \1"),
        (rf"{NUMBER}%", "#%"),
    ):
        text = re.sub(pattern, word, text, flags=re.M)
    return [" ".join(line.split()) for line in text.splitlines()]
