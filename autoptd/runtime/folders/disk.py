"""Files of a checkpoint that are complete or absent: every operation on the disk that a save makes, and checked reads.

In: paths and bytes. Out: files whose bytes are on the disk when they are closed, with a CRC32 of every MiB.

    with new_file(folder / "__0_0.distcp") as file:
        torch.save(tensor, file)
    with checked_file(folder / "__0_0.distcp", file.crcs) as again:
        torch.load(again)

A rename is on the disk only once its folder is synced, and the renamed file only if it was synced before.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autoptd.errors import RuntimeFault

# Bytes that share a CRC32.
BLOCK_BYTES = 1 << 20
# Blocks of a file that are kept: the head and the tail of an item, and where the next one begins.
KEPT_BLOCKS = 4
# Start writeback every time this number of bytes is written, to use the disk before fsync as well.
AHEAD_BYTES = 16 << 20
REMEDY = "load the checkpoint before it"


class NewFile:
    """A file that is written from start to end; closing it brings all bytes to the disk."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._buffer = bytearray()
        self._put_bytes = self._begun_bytes = 0
        self.nbytes = 0
        self.crcs: list[int] = []
        self.failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        # Large data is not copied, and each block is still in the processor's cache when it is written.
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
        """Do nothing: torch flushes after every tensor, and small ones are collected here."""

    def close(self) -> None:
        if self._descriptor >= 0 and self.failure is None:
            self._drain()
            os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file without completing it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

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
    """Ask the disk to begin with these bytes of a file, where the system takes such advice.

    POSIX's advice that they are not needed starts the writeback of dirty pages on Linux, and drops only clean ones.
    """
    if hasattr(os, "posix_fadvise"):
        # Advice only: a file system may not know it, and the bytes are synced at the end in any case.
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """Open a file that does not exist yet; when the block ends, its bytes are on the disk."""
    file = NewFile(path)
    try:
        yield file
        file.close()
    except Exception as error:
        if file.failure not in (None, error):
            # torch.save masks the failure with an error about the end of the archive.
            raise file.failure from error
        raise
    finally:
        file.abandon()


class CheckedFile(io.RawIOBase):
    """A file that is read in whole blocks, each checked by its CRC32; without `crcs` nothing is checked.

    torch.load's C++ code reads through it and sees an error as the end of the file, so the error is kept as
    `fault`.
    """

    def __init__(self, path: Path, crcs: Sequence[int] | None) -> None:
        self.name, self._crcs = str(path), crcs
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._size, self._at = os.fstat(self._descriptor).st_size, 0
        self._kept: dict[int, memoryview] = {}
        self.nbytes = 0
        self.fault: RuntimeFault | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._at < self._size and self.fault is None:
            number, skipped = divmod(self._at, BLOCK_BYTES)
            room = view[done : done + BLOCK_BYTES - skipped]
            try:
                if number not in self._kept and len(room) == BLOCK_BYTES <= self._size - self._at:
                    count = self._read(number, room)
                else:
                    part = self._block(number)[skipped : skipped + len(room)]
                    count = len(part)
                    room[:count] = part
            except RuntimeFault as fault:
                self.fault = fault
                break
            done, self._at = done + count, self._at + count
        return done

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _block(self, number: int) -> memoryview:
        if number not in self._kept:
            block = memoryview(bytearray(min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)))
            self._read(number, block)
            if len(self._kept) == KEPT_BLOCKS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[number] = block
        return self._kept[number]

    def _read(self, number: int, into: memoryview) -> int:
        start, done = number * BLOCK_BYTES, 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], start + done)
            except OSError as error:
                raise RuntimeFault(self.name, f"cannot be read: {error}", REMEDY) from error
            if not count:
                raise RuntimeFault(self.name, f"ends at byte {start + done}", REMEDY)
            done += count
        self.nbytes += done
        if self._crcs is not None and zlib.crc32(into) != self._crcs[number]:
            fact = f"was changed after it was written: block {number}"
            raise RuntimeFault(self.name, fact, REMEDY)
        return done


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
    """Remove a folder without following links; do nothing if it does not exist."""
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
