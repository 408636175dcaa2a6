"""What `torch.save` writes around the memory of a tensor: the same bytes for all tensors of one shape and dtype.

In: a tensor. Out: the bytes before its elements, and those behind them, so that most tensors are written without pickling.

    around = around_of(x)
    file.write(around.head); file.write(bytes_of(x)); file.write(around.tail)         # torch.load reads it

An item is a zip archive without compression. Its own CRCs are 0, as torch leaves them where they are switched off: files of
checkpoints have a CRC32 for each MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from autoptd.errors import InternalError
from autoptd.ir.rectangles import Sizes


class Around(NamedTuple):
    """The bytes of an item before and behind a tensor's elements."""

    head: bytes
    tail: bytes


_known: dict[tuple[torch.dtype, Sizes], Around] = {}
_lock = Lock()


def around_of(x: torch.Tensor) -> Around:
    """Return what is written around a tensor on the host whose memory has its elements only."""
    kind = (x.dtype, tuple(x.shape))
    if kind not in _known:
        sink = _Sink(x)
        with _lock, _without_crc32():
            torch.save(x, sink)  # type: ignore[arg-type]  # it writes, and nothing else is asked of it
        _known[kind] = sink.around()
    return _known[kind]


def bytes_of(x: torch.Tensor) -> memoryview:
    """Return the memory of such a tensor."""
    flat: Any = x.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@contextmanager
def _without_crc32() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Sink:
    """A file that keeps what is written, but for the memory of one tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self._place, self._nbytes = x.data_ptr(), x.nbytes
        self._parts = [bytearray()]

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) == self._nbytes and address_of(view) == self._place:
            self._parts.append(bytearray())
        else:
            self._parts[-1] += view
        return len(view)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def around(self) -> Around:
        if len(self._parts) != 2:
            raise InternalError("torch.save", "does not write a tensor's memory in one piece")
        head, tail = self._parts
        return Around(bytes(head), bytes(tail))


def address_of(view: memoryview) -> int:
    found: Any = np.frombuffer(view, np.uint8)
    return int(found.ctypes.data)


__all__ = ["Around", "around_of", "bytes_of"]
