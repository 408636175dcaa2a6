"""A part of a file as a file of its own, for readers that expect to begin at byte 0.

with path.open("rb") as file:
    torch.load(window(file.fileno(), start=4096, nbytes=1500), weights_only=True)
"""

from __future__ import annotations

import io
import os
from typing import IO, Any, cast


class _Window(io.RawIOBase):
    """Some bytes of a file, as a file of their own."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        self._descriptor, self._start, self._nbytes = descriptor, start, nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._nbytes - self._at))
        data = os.pread(self._descriptor, count, self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def window(descriptor: int, start: int, nbytes: int) -> IO[bytes]:
    """Return `nbytes` of a file from `start` on as a file of their own."""
    return cast(IO[bytes], _Window(descriptor, start, nbytes))


__all__ = ["window"]
