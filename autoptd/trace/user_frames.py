"""Extract the stack of the line that made a node of a trace, without torch's own frames.

UserFrames(Watched.forward.__code__).extract().summary()     # the frames of the model
"""

from __future__ import annotations

import os
import sys
import traceback
import types

import torch


class UserFrames:
    """Replace torch's CapturedTraceback during tracing; extract the stack from `root`, without torch frames.

    Stacks share their summaries of lines, which saves most of the work for repeated layers.
    """

    OWN = os.path.dirname(torch.__file__) + os.sep

    def __init__(self, root: types.CodeType | None = None) -> None:
        self._root = root
        self._lines: dict[tuple[str, int, str], traceback.FrameSummary] = {}

    def extract(self, **_: object) -> _Stack:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(self.OWN):
                # Do not use `code` as the key: equal code objects may be from different files.
                line = code.co_filename, frame.f_lineno, code.co_name
                frames.append(self._lines.get(line) or self._summary(line))
            # torch skips the callers of the first forward.
            frame = None if code is self._root else frame.f_back  # type: ignore[assignment]
        return _Stack(frames[::-1])

    def _summary(self, line: tuple[str, int, str]) -> traceback.FrameSummary:
        return self._lines.setdefault(line, traceback.FrameSummary(*line, lookup_line=False))


class _Stack:
    """Provide the part of a captured stack that torch uses."""

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self._frames = frames

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self._frames)


__all__ = ["UserFrames"]
