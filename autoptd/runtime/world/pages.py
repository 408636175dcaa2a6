"""Note the calls of each rank of a machine where the others can read them after it died.

Gloo ends a process by SIGABRT when a peer sends it more than it expects: no Python runs any more, its last
beat may be a second old, and the store may have died with it. So each rank notes its calls in a *page*, a
file in memory, before it makes them.

    pages = Pages("a name of this run", rank=0)
    pages.write(("F0.1", "all_reduce", 17))
    pages.read(1)                       # ["F0.2", "send", "18"]: what rank 1 wrote last; None where it is elsewhere
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Bytes of a page.
SIZE = 4096
# Seconds after which a page of another run is removed.
OLD = 3600
BETWEEN, END, LAST = "\x1f", "\0", b"\0"


class Pages:
    """The pages of the ranks of this machine; `rank` writes to its own page only."""

    def __init__(self, run: str, rank: int, folder: str | None = None) -> None:
        self._folder = Path(folder or ("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()))
        self._prefix = f"autoptd-{run}-"
        self._own = self._path(rank)
        # A run that was killed leaves its pages: no rank of it is left to remove them.
        for path in self._folder.glob("autoptd-*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > OLD:
                    self._remove_dead(path)
        file = os.open(self._own, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, SIZE)
        self._memory = mmap.mmap(file, SIZE)
        os.close(file)
        # The pages of other ranks, once they were looked at; None of those on other machines.
        self._others: dict[int, mmap.mmap | None] = {}
        self.write(())

    def write(self, words: Sequence[object]) -> None:
        """Replace what this rank has noted."""
        text = (BETWEEN.join(map(str, (os.getpid(), *words))) + END).encode()
        # A longer note is dropped: half a note would be misread.
        if len(text) <= SIZE:
            self._memory[: len(text)] = text

    def read(self, rank: int) -> list[str] | None:
        """Return the last note of a rank; None where it has none on this machine."""
        words = self._words(self._path(rank))
        return words[1:] or None if words else None

    def first_other(self, ranks: Sequence[int], begin: Sequence[object], end: Sequence[object]) -> int | None:
        """Return the first of some ranks on this machine whose note has the words of `begin`, and then others than those of
        `end`; None without one.
        """
        start = f"{BETWEEN}{BETWEEN.join(map(str, begin))}{BETWEEN}".encode()
        rest = f"{BETWEEN.join(map(str, end))}{END}".encode()
        return next((rank for rank in ranks if self._is_other(rank, start, rest)), None)

    def _is_other(self, rank: int, start: bytes, rest: bytes) -> bool:
        if rank not in self._others:
            self._others[rank] = self._mapped(rank)
        if (memory := self._others[rank]) is None:
            return False
        for pause in (0.001, 0.01, None):
            text = memory[: memory.find(LAST) + 1]
            at = text.find(start)
            if at < 0 or text[at + len(start) :] == rest:
                return False
            # The other rank may be writing, or about to make its next call: what differs is read again.
            if pause is not None:
                time.sleep(pause)
        return True

    def _mapped(self, rank: int) -> mmap.mmap | None:
        with suppress(OSError, ValueError), self._path(rank).open("rb") as file:
            return mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        return None

    def is_dead(self, rank: int) -> bool:
        """Tell whether a rank of this machine has ended without removing its page."""
        return _is_dead(self._words(self._path(rank)))

    def close(self) -> None:
        """Remove this rank's page, and those of ranks that died without doing so."""
        with suppress(OSError):
            self._own.unlink()
        for path in self._folder.glob(f"{self._prefix}*"):
            self._remove_dead(path)

    def _remove_dead(self, path: Path) -> None:
        if _is_dead(self._words(path)):
            with suppress(OSError):
                path.unlink()

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._prefix}{rank}"

    def _words(self, path: Path) -> list[str]:
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_bytes().partition(END.encode())[0].decode()
            return text.split(BETWEEN) if text else []
        return []


def _is_dead(words: Sequence[str]) -> bool:
    """Whether the process that wrote `words` is gone, or only waits for its parent to take notice."""
    if not words or not words[0].isdecimal():
        return False
    try:
        os.kill(int(words[0]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    with suppress(OSError):
        return Path(f"/proc/{words[0]}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False
