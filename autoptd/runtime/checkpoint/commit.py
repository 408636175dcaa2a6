"""Write checkpoints so that a folder with a checkpoint's name is always complete; name, find, lock and remove
such folders.

A save writes into `step-00001000.part-<token>`: each rank a file and a report, then one rank `.metadata` for
other programs and `checkpoint.json` for AutoPTD; a rename makes it `step-00001000`. Whenever a process dies,
the folder of that name is the complete new checkpoint or the complete previous one, which may still be called
`.old-<token>` (`find`).

    part = begin(Path("ckpts/step-00001000"), token)        # one rank
    write_rank(part, staged, objects)                       # each rank: see `stage.py`
    finish(part, folder, ranks, about, names, extra)        # one rank, after all reports are there
    sweep(folder)

Files are synced before the folder that names them, the folder before the rename, and the rename before
anything is removed. In the folder of a run, `Lock` keeps a second run out, `checkpoints` lists the complete
ones, `prune` removes the oldest.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import secrets
import socket
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.checkpoint.manifest import (
    EXTRA,
    MANIFEST,
    METADATA,
    Manifest,
    add_tensors,
    opened_manifest,
    read_checked,
)
from autoptd.runtime.folders.disk import (
    left_of,
    make_folder,
    remove_file,
    rename,
    sync_folder,
    write_file,
)

PART, OLD, GONE, DAMAGED, LOCK = ".part-", ".old-", ".gone-", ".damaged-", ".lock"
# From `new_token`, with a number appended by a run's saves; other names belong to the user.
TOKEN = r"[0-9a-f]{8}(-\d+)?"
# Seconds in which the processes of a run that was killed end: workers of loaders look for their parent every
# five.
PATIENCE = 10.0


# The names of folders.


def new_token() -> str:
    """Return the token of one save, so that two runs never write into the same folder."""
    return secrets.token_hex(4)


def path_of(folder: str | os.PathLike[str], site: str) -> Path:
    """Return a folder's path; PlanError for anything else, such as "" or the address of a store."""
    text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise PlanError(site, f"{folder!r} is not a valid directory path", "for example 'ckpts/step-1000'")
    if "://" in text:
        raise PlanError(
            site, f"{text!r} is an address, not a folder", "a folder in which the store is mounted"
        )
    return Path(text)


def part_of(folder: Path, token: str) -> Path:
    """Return the folder in which a checkpoint is written before it is complete; PlanError for a path without
    a name (`..`).
    """
    if folder.name in ("", ".."):
        raise PlanError(str(folder), "must name a new directory", "the path of a new folder, with its name")
    return folder.with_name(f"{folder.name}{PART}{token}")


def marked(path: Path, mark: str) -> str:
    """Return the name of the checkpoint for which a save made `path`, with a mark and a token; "" for any
    other path.
    """
    found = re.fullmatch(f"(.+){re.escape(mark)}{TOKEN}", path.name, re.DOTALL)
    return found[1] if found else ""


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint; -1 for a folder with another name."""
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found[1]) if found else -1


# Find a checkpoint.


def is_complete(folder: Path) -> bool:
    """Tell whether a folder is a checkpoint that was committed."""
    return not marked(folder, PART) and (folder / MANIFEST).is_file()


def find(folder: Path) -> Path:
    """Return the folder of a checkpoint, or its `.old-` copy if a save that replaced it did not finish;
    PlanError without either.
    """
    if is_complete(folder):
        return folder
    old = [path for path in siblings(folder, OLD) if is_complete(path)]
    if old:
        return max(old, key=lambda path: path.stat().st_mtime)
    raise PlanError(str(folder), *_why_none(folder))


def _why_none(folder: Path) -> tuple[str, str]:
    """Return (fact, remedy) for a path without a checkpoint."""
    remedy = "the path of a folder that pm.save wrote"
    if folder.is_file():
        return "is a file", f"{remedy}; torch.load and pm.load_state_dict for a file of torch.save"
    if not folder.exists():
        if siblings(folder, PART):
            return "was never completed: a save left its temporary folder only", remedy
        return "there is no such folder", remedy
    if marked(folder, PART):
        return "is the temporary folder of a save that did not finish", remedy
    if not any(folder.iterdir()):
        return "is an empty folder", remedy
    if pickled := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        return f"holds pickled values ({pickled[0].name}), which AutoPTD does not read", remedy
    return f"has no {MANIFEST}", remedy


def siblings(folder: Path, mark: str) -> list[Path]:
    """Return the temporary folders that saves of `folder` made next to it."""
    # "." is named by its absolute path. "/" has no name, and would match every path without a mark.
    here = folder if folder.name else folder.absolute()
    if not here.name or not here.parent.is_dir():
        return []
    return sorted(path for path in here.parent.iterdir() if marked(path, mark) == here.name)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run's folder, the last step first."""
    if not folder.is_dir():
        return []
    # A checkpoint that was being replaced is found under its `.old-` name.
    names = {marked(path, OLD) or path.name for path in folder.iterdir() if is_complete(path)}
    return sorted((folder / name for name in names if step_of(folder / name) >= 0), key=step_of, reverse=True)


def damage_of(path: Path) -> str:
    """Describe the damage to the files of a checkpoint, without reading tensors; "" if there is none."""
    try:
        place = find(path)
        manifest = opened_manifest(place)
        for file, record in manifest.files.items():
            if "crc32" in record:
                read_checked(place, manifest, file)
    except PlanError as error:
        return f"{error.site}: {error.fact}"
    return ""


# Write one.


def begin(folder: Path, token: str) -> Path:
    """Make the folder to write into; PlanError if anything but a checkpoint would be replaced."""
    if folder.is_symlink():
        fact = f"is a symbolic link to {str(folder.readlink())!r}, and would be replaced"
        raise PlanError(str(folder), fact, "the path of a folder; make a link to it after the save")
    if marked(folder, PART) or marked(folder, OLD):
        raise PlanError(str(folder), "is named like the temporary folder of a save", "another name")
    if folder.exists() and not is_complete(folder) and (folder.is_file() or any(folder.iterdir())):
        fact = "is a file" if folder.is_file() else "holds other files than those of a checkpoint"
        raise PlanError(str(folder), f"{fact}, and would be replaced", "another folder, or an empty one")
    try:
        make_parents(folder.parent)
        make_folder(part_of(folder, token))
    except OSError as error:
        raise PlanError(str(folder), f"cannot be written: {error}", "a folder that can be written") from error
    return part_of(folder, token)


def make_parents(folder: Path) -> None:
    """Make a folder and those above it as needed, and sync their names to the disk."""
    if folder.is_dir():
        return
    make_parents(folder.parent)
    make_folder(folder)
    sync_folder(folder.parent)


@dataclass
class Report:
    """What one rank has written: torch's plan and results, the other values of its optimizer state, its
    files.

    `prints` has its part of the fingerprint of each tensor, by name: see `runtime/params/fingerprint.py`.
    """

    rank: int
    plan: Any
    results: list[Any]
    values: dict[str, dict[str, Any]]
    prints: dict[str, int]
    files: dict[str, dict[str, int]] = field(default_factory=dict)


def leave_report(part: Path, report: Report) -> None:
    """Write a rank's report, which is complete or absent, for the rank that commits."""
    new = part / f"{report_file(report.rank)}.new"
    write_file(new, pickle.dumps(report))
    rename(new, part / report_file(report.rank))


def report_file(rank: int) -> str:
    return f"report-{rank}"


def _take_report(part: Path, rank: int) -> Report:
    """Read a rank's report, and remove it."""
    report: Report = pickle.loads((part / report_file(rank)).read_bytes())
    remove_file(part / report_file(rank))
    return report


def finish(
    part: Path,
    folder: Path,
    ranks: Sequence[int],
    about: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    extra: bytes,
) -> None:
    """Commit the files of `ranks`; RuntimeFault if files of a rank are not complete here.

    `names` has all names of tied parameters by the first one; `extra` is the content of `extra.pt`.
    """
    from autoptd.runtime.checkpoint.storage import write_metadata

    reports = [_take_report(part, rank) for rank in ranks]
    if findings := list(_incomplete(part, reports)):
        remedy = "a folder with room that all nodes share; earlier checkpoints are intact"
        raise RuntimeFault("pm.save", "; ".join(findings[:5]), remedy)
    others = {name: first for first, tied in names.items() for name in tied if name != first}
    plans, results = [report.plan for report in reports], [report.results for report in reports]
    metadata = write_metadata(part, plans, results, others)
    data = (part / METADATA).read_bytes()
    manifest = _manifest_of(reports, about, metadata)
    manifest.files |= {METADATA: entry_of(data), EXTRA: entry_of(extra)}
    write_file(part / EXTRA, extra)
    write_file(part / MANIFEST, manifest.text())
    sync_folder(part)
    old = folder.with_name(f"{folder.name}{OLD}{part.name.rpartition(PART)[2]}")
    if is_complete(folder):
        rename(folder, old)
    rename(part, folder)
    sync_folder(folder.parent)


def _incomplete(part: Path, reports: Sequence[Report]) -> Iterator[str]:
    for report in reports:
        for file, record in report.files.items():
            path = part / file
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                yield f"rank {report.rank}: {file} is not complete in the folder that rank 0 sees"


def _manifest_of(reports: Sequence[Report], about: Mapping[str, Any], metadata: Any) -> Manifest:
    """Return the manifest of the files of all ranks, with the parameters that have no optimizer state."""
    manifest = Manifest(dict(about))
    for report in reports:
        manifest.files |= report.files
        manifest.values |= report.values
    add_tensors(manifest, metadata)
    buffers = about.get("buffers", ())
    prints = (own for report in reports for name, own in report.prints.items() if name not in buffers)
    # As `runtime/params/fingerprint.py` writes that of running ranks.
    manifest.about["fingerprint"] = f"{sum(prints) % (1 << 64):016x}"
    if (record := manifest.optimizer) is not None:
        # Frozen ones, and those that had no gradient yet.
        names = [name for group in record["groups"] for name in group["params"]]
        known = manifest.state.keys() | manifest.values.keys()
        manifest.about["optimizer"] = {**record, "stateless": [name for name in names if name not in known]}
    return manifest


def entry_of(data: bytes) -> dict[str, int]:
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


# Remove others. Each returns the paths that could not be removed, with the reasons.


def sweep(folder: Path) -> list[str]:
    """Remove the checkpoint that this save has replaced, and temporary folders of saves of `folder` that did
    not finish.
    """
    return [fact for path in [*siblings(folder, PART), *siblings(folder, OLD)] for fact in left_of(path)]


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what unfinished saves and removals left in a run's folder, while no run writes there."""
    left: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = marked(path, OLD)
        is_replaced = bool(name) and is_complete(folder / name)
        if path.is_dir() and (marked(path, PART) or marked(path, GONE) or is_replaced):
            left += left_of(path)
    return left


def prune(folder: Path, keep: int | None, newest: Path, token: str) -> list[str]:
    """Remove all but the last `keep` checkpoints, and never `newest`."""
    left: list[str] = []
    for path in checkpoints(folder)[keep:] if keep is not None else []:
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


def put_aside(path: Path, token: str) -> Path:
    """Rename a damaged checkpoint, so that `resume` does not take it again; return its new path."""
    aside = path.with_name(f"{path.name}{DAMAGED}{token}")
    rename(find(path), aside)
    return aside


class Lock:
    """Lets one run write into a folder: held until `free`, or until the process that holds it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor = -1

    def take(self) -> None:
        """Take the lock; PlanError if another process keeps it for longer than a killed run takes to end."""
        make_parents(self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # A lock is held as long as any copy of the descriptor is open: a forked worker must not keep it.
        os.register_at_fork(after_in_child=self.free)
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

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            text = f"{self._path.parent}: this file system has no locks ({error}): make sure that one run writes there"
            warnings.warn(text, stacklevel=2)
        return True
