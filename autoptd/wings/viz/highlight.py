"""Python source as HTML with colours, by the standard library's own tokenizer.

python_html("x = 1  # one")     # 'x = <span class="n">1</span>  <span class="c"># one</span>'

Classes: `k` keyword, `s` text, `n` number, `c` comment, `d` the name that a def or class defines.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from html import escape

CLASSES = {tokenize.STRING: "s", tokenize.NUMBER: "n", tokenize.COMMENT: "c"}


def python_html(source: str) -> str:
    """Return `source` as HTML; what is not Python is only escaped."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return escape(source)
    # Tokens have rows and columns, `source` is cut at offsets.
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    parts, done, before = [], 0, ""
    for token in tokens:
        kind = _class(token, before)
        # What lies between tokens, blanks and line ends, is escaped with the next of them.
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


__all__ = ["python_html"]
