"""Files of a checkpoint that are there, complete, or not at all: every operation on the disk that a save makes.

In: paths and bytes. Out: files whose bytes are on the disk when they are closed, with a CRC32 of every MiB.

    with new_file(folder / "__0_0.distcp") as file:
        torch.save(tensor, file)
    file.nbytes, file.crcs
    sync_folder(folder); rename(folder, final); sync_folder(final.parent)

A rename is on the disk only when its folder is synced, and what it names only if that was synced before.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Bytes that share a CRC32.
BLOCK_BYTES = 1 << 20
# Bytes behind which the disk is asked to begin: it works beside the processor, not behind it when the file is synced.
AHEAD_BYTES = 16 << 20


class NewFile:
    """A file that is written from start to end."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._buffer = bytearray()
        self._put_bytes = self._begun_bytes = 0
        self.nbytes = 0
        self.crcs: list[int] = []
        self.failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        # What is large is not copied. Its blocks are still in the processor's cache when they are written.
        if len(view) >= BLOCK_BYTES:
            self._drain()
            for at in range(0, len(view), BLOCK_BYTES):
                self._count(part := view[at : at + BLOCK_BYTES])
                self._put(part)
            return len(view)
        self._count(view)
        self._buffer += view
        if len(self._buffer) >= BLOCK_BYTES:
            self._drain()
        return len(view)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        """Do nothing: torch flushes behind every tensor, and small ones are collected here."""

    def finish(self) -> None:
        """Bring all bytes to the disk."""
        self._drain()
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def crc(self) -> int:
        """The CRC32 of the file, if it has one block at most."""
        assert len(self.crcs) <= 1
        return self.crcs[0] if self.crcs else 0

    def _count(self, view: memoryview) -> None:
        """Add bytes to the CRC of the last block, and begin new ones."""
        while view:
            room = -self.nbytes % BLOCK_BYTES
            if not room:
                self.crcs.append(0)
                room = BLOCK_BYTES
            self.crcs[-1] = zlib.crc32(view[:room], self.crcs[-1])
            self.nbytes += len(view[:room])
            view = view[room:]

    def _drain(self) -> None:
        self._put(memoryview(self._buffer))
        self._buffer = bytearray()

    def _put(self, view: memoryview) -> None:
        try:
            while view:
                count = os.write(self._descriptor, view)
                self._put_bytes += count
                view = view[count:]
        except OSError as error:
            self.failure = error
            raise
        if self._put_bytes - self._begun_bytes >= AHEAD_BYTES:
            _begin_writeback(self._descriptor, self._begun_bytes, self._put_bytes)
            self._begun_bytes = self._put_bytes


def _begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Let the disk begin with these bytes of a file, where the system can be asked to.

    POSIX's advice that they are not needed starts the writeback of dirty pages on Linux, and drops only clean ones.
    """
    if hasattr(os, "posix_fadvise"):
        # Advice only: a file system may not know it, and the bytes are synced at the end in any case.
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """Open a file that is not there yet; behind the block its bytes are on the disk."""
    file = NewFile(path)
    try:
        yield file
        file.finish()
    except Exception as error:
        if file.failure not in (None, error):
            # torch.save covers what failed by an error of its own: the archive does not end where it should.
            raise file.failure from error
        raise
    finally:
        file.close()


def write_file(path: Path, data: bytes) -> None:
    with new_file(path) as file:
        file.write(data)


def make_folder(path: Path) -> None:
    os.mkdir(path)


def rename(old: Path, new: Path) -> None:
    os.rename(old, new)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove a folder, and not what links in it lead to; one that is not there is no error."""
    if path.is_symlink():
        return remove_file(path)
    with suppress(FileNotFoundError):
        for name in os.listdir(path):
            inside = path / name
            (remove_folder if inside.is_dir() else remove_file)(inside)
        os.rmdir(path)


def left_of(path: Path) -> list[str]:
    """Remove a folder that is not needed; return what could not be removed, and why."""
    try:
        remove_folder(path)
    except OSError as error:
        return [f"{path} ({error.strerror or error})"]
    return []


__all__ = [
    "BLOCK_BYTES",
    "NewFile",
    "left_of",
    "make_folder",
    "new_file",
    "remove_file",
    "remove_folder",
    "rename",
    "sync_folder",
    "write_file",
]
