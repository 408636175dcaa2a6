"""Lines of code: what an implementation asks its user to write.

code_lines(split_tensors, Pipeline)      # of functions, classes or modules together
"""

from __future__ import annotations

import inspect
from typing import Any


def code_lines(*objects: Any) -> int:
    """Count lines of source without blanks, comments and docstrings."""
    lines = 0
    for one in objects:
        inside = False
        for line in map(str.strip, inspect.getsource(one).splitlines()):
            quotes = line.count('"""')
            is_code = not inside and not quotes and line and not line.startswith("#")
            inside ^= quotes == 1
            lines += bool(is_code)
    return lines
