"""The folder of a run: its checkpoints by step, what a run that ended left there, and the lock of the one that writes.

In: the folder. Out: paths, the newest first; folders removed; or the fact that another run writes there.

    with_lock = Lock(folder); with_lock.take()
    for path in checkpoints(folder): ...             # step-00002000, step-00001000
    remove_leftovers(folder); prune(folder, keep=3, newest=folder / "step-00002000")
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
import warnings
from pathlib import Path

from autoptd.errors import PlanError
from autoptd.runtime.checkpoint.commit import OLD, PART, find, is_complete, make_parents, marked
from autoptd.runtime.checkpoint.manifest import check_files, read_checked, read_manifest
from autoptd.runtime.folders.disk import left_of, rename

GONE, DAMAGED, LOCK = ".gone-", ".damaged-", ".lock"
# Seconds in which the processes of a run that was killed end: loaders' workers look for their parent every five.
PATIENCE = 10.0


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint; -1 for a folder of another name."""
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found[1]) if found else -1


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, that of the last step first."""
    if not folder.is_dir():
        return []
    # A checkpoint that was being replaced is found under its `.old-` name.
    names = {marked(path, OLD) or path.name for path in folder.iterdir() if is_complete(path)}
    return sorted((folder / name for name in names if step_of(folder / name) >= 0), key=step_of, reverse=True)


def damage_of(path: Path) -> str:
    """Describe the damage to the files of a checkpoint, without reading tensors; "" if there is none."""
    try:
        place = find(path)
        manifest = read_manifest(place)
        check_files(place, manifest)
        for file, record in manifest.files.items():
            if "crc32" in record:
                read_checked(place, manifest, file)
    except PlanError as error:
        return f"{error.site}: {error.fact}"
    return ""


def put_aside(path: Path, token: str) -> Path:
    """Rename a damaged checkpoint, so that it is neither taken again nor in the way; return where it is."""
    aside = path.with_name(f"{path.name}{DAMAGED}{token}")
    rename(find(path), aside)
    return aside


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what saves and removals left that did not end; return what stays, and why. Only where no run writes."""
    left: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = marked(path, OLD)
        is_replaced = bool(name) and is_complete(folder / name)
        if path.is_dir() and (marked(path, PART) or marked(path, GONE) or is_replaced):
            left += left_of(path)
    return left


def prune(folder: Path, keep: int | None, newest: Path, token: str) -> list[str]:
    """Remove all but the last `keep` checkpoints, and never the one that was just written; return what stays, and why."""
    found, left = checkpoints(folder), list[str]()
    for path in found[keep:] if keep is not None else []:
        if path != newest:
            gone = path.with_name(f"{path.name}{GONE}{token}")
            # A half-removed folder must not look like a checkpoint.
            try:
                rename(find(path), gone)
            except OSError as error:
                left.append(f"{path} ({error.strerror or error})")
            else:
                left += left_of(gone)
    return left


class Lock:
    """Lets one run write into a folder: held until `free`, or until the process that holds it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor = -1

    def take(self) -> None:
        """Take the lock; PlanError where another process has it for longer than it takes to end."""
        make_parents(self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # A lock is held as long as any copy of the descriptor is open: a worker that is forked must not keep it.
        os.register_at_fork(after_in_child=self._forget)
        deadline = time.monotonic() + PATIENCE
        while not self._is_taken():
            if time.monotonic() > deadline:
                holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
                self.free()
                fact = f"another run writes its checkpoints there ({holder or 'unknown process'})"
                raise PlanError(
                    str(self._path.parent), fact, "end that run first, or give this one another folder"
                )
            time.sleep(0.1)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def free(self) -> None:
        """Let another run have the folder."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    _forget = free

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            text = f"{self._path.parent}: this file system has no locks ({error}): see to it that one run writes there"
            warnings.warn(text, stacklevel=2)
        return True


__all__ = [
    "LOCK",
    "Lock",
    "checkpoints",
    "damage_of",
    "name_of",
    "prune",
    "put_aside",
    "remove_leftovers",
    "step_of",
]
