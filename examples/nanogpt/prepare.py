"""Write `train.bin` and `val.bin`, which the two loops read: one token per byte, the last tenth for validation.

In: a folder and, if you like, your own text file (default: Python's help topics). Out: the two files, as uint16.

    python -m examples.nanogpt.prepare out/nanogpt my.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from examples.text import load_tokens


def prepare(folder: str | Path, text: str | Path | None = None) -> None:
    tokens = load_tokens(text).numpy().astype(np.uint16)
    cut = len(tokens) * 9 // 10
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokens[:cut].tofile(Path(folder) / "train.bin")
    tokens[cut:].tofile(Path(folder) / "val.bin")


if __name__ == "__main__":
    prepare(*sys.argv[1:])
