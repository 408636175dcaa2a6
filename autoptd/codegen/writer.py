"""Lines of source with their indentation, and the few texts that every part of a stage file is made of."""

from __future__ import annotations

import json
import keyword
from dataclasses import dataclass, field

from torch.fx import Node

WIDTH = 118


@dataclass
class Writer:
    """Lines of source, and which operator is on which line (counted from 1)."""

    lines: list[str] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)

    def add(self, indent: int, text: str, comment: str = "") -> None:
        self.lines.append(" " * (4 * indent) + text + (f"  # {comment}" if comment else ""))

    def extend(self, other: Writer) -> None:
        """Add what another one wrote."""
        self.nodes |= {len(self.lines) + number: node for number, node in other.nodes.items()}
        self.lines += other.lines

    def gap(self) -> None:
        if self.lines and self.lines[-1] and not self.lines[-1].endswith(":"):
            self.lines.append("")


def weight_text(root: str, name: str) -> str:
    """`w.transformer.h[0].ln_1.weight` for "transformer.h.0.ln_1.weight"; what is no name in Python: `w["my-emb"].weight`.

    The empty name is the root itself: a layer may be no more than a parameter in a list.
    """
    text = root
    for part in name.split(".") if name else ():
        # Python reads names of other alphabets in a normal form of its own.
        is_name = part.isascii() and part.isidentifier() and not keyword.iskeyword(part) and not part.startswith("_")
        text += (
            f".{part}"
            if is_name
            else f"[{part}]"
            if part.isdecimal() and str(int(part)) == part
            else f"[{json.dumps(part)}]"
        )
    return text
