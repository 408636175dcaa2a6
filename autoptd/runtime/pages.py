"""Notes of the ranks of a machine, each of which the others can read after its death.

Gloo ends a process by SIGABRT when a peer sends it more than it expects: no Python runs any more, its last beat may be a second
old, and the store may have died with it. So each rank notes its calls in a *page*, a file in memory, before it makes them.

    pages = Pages("a name of this run", rank=0)
    pages.write(("F0.1", "all_reduce", 17))
    pages.read(1)                       # ["F0.2", "send", "18"]: what rank 1 wrote last; None where it is elsewhere
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SIZE = 4096  # bytes
BETWEEN, END = "\x1f", "\0"


class Pages:
    """The pages of the ranks of this machine, of which `rank` writes its own."""

    def __init__(self, run: str, rank: int, folder: str | None = None) -> None:
        self._folder = Path(folder or ("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()))
        self._prefix = f"autoptd-{run}-"
        self._own = self._path(rank)
        file = os.open(self._own, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, SIZE)
        self._memory = mmap.mmap(file, SIZE)
        os.close(file)
        self.write(())

    def write(self, words: Sequence[object]) -> None:
        """Replace what this rank has noted."""
        text = (BETWEEN.join(map(str, (os.getpid(), *words))) + END).encode()
        if len(text) <= SIZE:
            self._memory[: len(text)] = text

    def read(self, rank: int) -> list[str] | None:
        """The last note of a rank; None where it has none on this machine."""
        words = self._words(self._path(rank))
        return words[1:] or None if words else None

    def close(self) -> None:
        """Remove this rank's page, and those of ranks that died without doing so."""
        for path in self._folder.glob(f"{self._prefix}*"):
            words = self._words(path)
            if path == self._own or (words and not Path(f"/proc/{words[0]}").exists()):
                with suppress(OSError):
                    path.unlink()

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._prefix}{rank}"

    def _words(self, path: Path) -> list[str]:
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_bytes().partition(END.encode())[0].decode()
            return text.split(BETWEEN) if text else []
        return []
