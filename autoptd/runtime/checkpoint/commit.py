"""Commit the files of all ranks atomically: a folder without `.part-` in its name is a complete checkpoint.

In: a folder `step-00001000.part-<token>` with the files and reports of all ranks. Out: `step-00001000`, with
`.metadata` for other programs and `checkpoint.json` for this one. Whenever a process dies, the folder of that
name is the complete new checkpoint or the complete previous one (or that one is kept as `.old-<token>`:
`find`).

    part = begin(Path("ckpts/step-00001000"), token)        # one rank; then all write into it
    finish(part, folder, ranks, about, names, extra)        # one rank, when all have left their reports; then `sweep(folder)`

Files are synced before the folder that names them, the folder before the rename, the rename before anything
is removed.
"""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.checkpoint.manifest import (
    EXTRA,
    MANIFEST,
    METADATA,
    Manifest,
    add_tensors,
)
from autoptd.runtime.checkpoint.write import Report, take_report
from autoptd.runtime.folders.disk import left_of, make_folder, rename, sync_folder, write_file
from autoptd.runtime.params.fingerprint import text_of

PART, OLD = ".part-", ".old-"
# From `new_token`, with a number appended by a run's saves; other names belong to the user.
TOKEN = r"[0-9a-f]{8}(-\d+)?"


def new_token() -> str:
    """Return a token of one save: two runs never write into the same folder."""
    return secrets.token_hex(4)


def path_of(folder: str | os.PathLike[str], site: str) -> Path:
    """Return a folder's path; raise PlanError for anything else, such as the address of a store."""
    text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise PlanError(site, f"{folder!r} is no path of a folder", "for example 'ckpts/step-1000'")
    if "://" in text:
        raise PlanError(
            site, f"{text!r} is an address, not a folder", "a folder in which the store is mounted"
        )
    return Path(text)


def part_of(folder: Path, token: str) -> Path:
    """Return where a checkpoint is written before it is complete; PlanError for a path without a name, such as `..`."""
    if folder.name in ("", ".."):
        raise PlanError(str(folder), "names no folder of its own", "the path of a new folder, with its name")
    return folder.with_name(f"{folder.name}{PART}{token}")


def marked(path: Path, mark: str) -> str:
    """Return the name of the checkpoint for which a save made `path`, with a mark and a token; "" where none did."""
    found = re.fullmatch(f"(.+){re.escape(mark)}{TOKEN}", path.name, re.DOTALL)
    return found[1] if found else ""


def is_complete(folder: Path) -> bool:
    """Tell whether a folder is a checkpoint that was committed."""
    return not marked(folder, PART) and (folder / MANIFEST).is_file()


def find(folder: Path) -> Path:
    """Return the folder of a checkpoint, or its `.old-` copy if a save that replaced it did not finish.

    Raise PlanError if there is neither.
    """
    if is_complete(folder):
        return folder
    old = [path for path in beside(folder, OLD) if is_complete(path)]
    if old:
        return max(old, key=lambda path: path.stat().st_mtime)
    raise PlanError(str(folder), *why_none(folder))


def why_none(folder: Path) -> tuple[str, str]:
    """Return (fact, remedy) for a path at which there is no checkpoint."""
    remedy = "the path of a folder that pm.save wrote"
    if folder.is_file():
        return "is a file", f"{remedy}; torch.load and pm.load_state_dict for what torch.save wrote"
    if not folder.exists():
        if beside(folder, PART):
            return "was never completed: there is only what a save that ended early left", remedy
        return "there is no such folder", remedy
    if marked(folder, PART):
        return "is what a save that ended early left", remedy
    if not any(folder.iterdir()):
        return "is an empty folder", remedy
    if pickled := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        return f"holds pickled values ({pickled[0].name}), which are not read", remedy
    return f"has no {MANIFEST}", remedy


def beside(folder: Path, mark: str) -> list[Path]:
    """Return the temporary folders that saves of `folder` made in its parent."""
    if not folder.parent.is_dir():
        return []
    return sorted(path for path in folder.parent.iterdir() if marked(path, mark) == folder.name)


def begin(folder: Path, token: str) -> Path:
    """Make the folder that is written into; PlanError where another thing than a checkpoint would be replaced."""
    if folder.is_symlink():
        fact = f"is a symbolic link to {str(folder.readlink())!r}, and would be replaced"
        raise PlanError(str(folder), fact, "the path of a folder; a link to it can be made behind the save")
    if marked(folder, PART) or marked(folder, OLD):
        raise PlanError(str(folder), "is named like what a save leaves that did not end", "another name")
    if folder.exists() and not is_complete(folder) and (folder.is_file() or any(folder.iterdir())):
        fact = "is a file" if folder.is_file() else "holds other files than those of a checkpoint"
        raise PlanError(str(folder), f"{fact}, and would be replaced", "another folder, or an empty one")
    try:
        make_parents(folder.parent)
        make_folder(part_of(folder, token))
    except OSError as error:
        raise PlanError(str(folder), f"cannot be written: {error}", "a folder that can be") from error
    return part_of(folder, token)


def make_parents(folder: Path) -> None:
    """Make a folder and those above it, where they are missing, and bring their names to the disk."""
    if folder.is_dir():
        return
    make_parents(folder.parent)
    make_folder(folder)
    sync_folder(folder.parent)


def finish(
    part: Path,
    folder: Path,
    ranks: Sequence[int],
    about: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    extra: bytes,
) -> None:
    """Commit what `ranks` wrote: RuntimeFault where one of them failed, or its files are not here.

    `names` has all names of tied parameters by the first one; `extra` is the content of `extra.pt`.
    """
    from autoptd.runtime.checkpoint.storage import write_metadata

    reports = [take_report(part, rank) for rank in ranks]
    check_reports(part, reports)
    others = {name: first for first, tied in names.items() for name in tied if name != first}
    plans, results = [report.plan for report in reports], [report.results for report in reports]
    metadata = write_metadata(part, plans, results, others)
    data = (part / METADATA).read_bytes()
    manifest = manifest_of(reports, about, metadata)
    manifest.files |= {METADATA: entry_of(data), EXTRA: entry_of(extra)}
    write_file(part / EXTRA, extra)
    write_file(part / MANIFEST, manifest.text())
    sync_folder(part)
    old = folder.with_name(f"{folder.name}{OLD}{part.name.rpartition(PART)[2]}")
    if is_complete(folder):
        rename(folder, old)
    rename(part, folder)
    sync_folder(folder.parent)


def sweep(folder: Path) -> list[str]:
    """Remove what this save has replaced, and what others of this folder left that did not end; return what stays, and why."""
    return [fact for path in [*beside(folder, PART), *beside(folder, OLD)] for fact in left_of(path)]


def check_reports(part: Path, reports: Sequence[Report]) -> None:
    """Raise RuntimeFault that names the ranks whose files are not in this folder."""
    findings = []
    for report in reports:
        for file, record in report.files.items():
            path = part / file
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                findings.append(f"rank {report.rank}: {file} is not complete in the folder that rank 0 sees")
    if findings:
        remedy = "a folder with room that all nodes share; what was saved before is intact"
        raise RuntimeFault("pm.save", "; ".join(findings[:5]), remedy)


def manifest_of(reports: Sequence[Report], about: Mapping[str, Any], metadata: Any) -> Manifest:
    """Return the manifest of what all ranks wrote, with a note of the parameters without state of the optimizer."""
    manifest = Manifest(dict(about))
    for report in reports:
        manifest.files |= report.files
        manifest.values |= report.values
    add_tensors(manifest, metadata)
    buffers = about.get("buffers", ())
    prints = (own for report in reports for name, own in report.prints.items() if name not in buffers)
    manifest.about["fingerprint"] = text_of(sum(prints))
    if (record := manifest.optimizer) is not None:
        # Frozen ones, and those that had no gradient yet.
        names = [name for group in record["groups"] for name in group["params"]]
        known = manifest.state.keys() | manifest.values.keys()
        manifest.about["optimizer"] = {**record, "stateless": [name for name in names if name not in known]}
    return manifest


def entry_of(data: bytes) -> dict[str, int]:
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


__all__ = [
    "OLD",
    "PART",
    "begin",
    "beside",
    "find",
    "finish",
    "is_complete",
    "marked",
    "new_token",
    "part_of",
    "path_of",
    "sweep",
]
