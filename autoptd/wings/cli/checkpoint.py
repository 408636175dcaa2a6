"""`autoptd checkpoint list|show|verify|convert`: inspect and convert checkpoints in one process, without the
model.

In: the directory of a checkpoint or of a run; for `convert --from`, the output of another program. Out: text,
JSON or converted files. Only one tensor is in memory at a time. `torch.save` needs all tensors at once, so
`--to torch` maps them from a scratch file next to the output.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.ir.scopes import activity
from autoptd.runtime.checkpoint.adopt import from_hf, from_torch, write_checkpoint
from autoptd.runtime.checkpoint.commit import PART, checkpoints, marked
from autoptd.runtime.checkpoint.manifest import MANIFEST, MODEL, Manifest, TensorRecord, decode, fqn
from autoptd.runtime.checkpoint.read import Checkpoint, open_any, open_checkpoint, verify_files
from autoptd.runtime.folders.disk import remove_file, remove_folder, rename
from autoptd.runtime.folders.read_folder import SINGLE, write_safetensors
from autoptd.runtime.params.parts import dtype_of
from autoptd.wings.words import count_text

# Smaller tensors stay in memory.
SMALL_BYTES = 1 << 16


def checkpoint(args: Namespace) -> int:
    """Run the action; return 0, or 1 if `verify` finds a difference."""
    actions = {"list": list_run, "show": show, "verify": verify, "convert": convert}
    return actions[args.action](args)


def list_run(args: Namespace) -> int:
    """Print the checkpoints of a run, newest first."""
    folder = Path(args.folder)
    if not folder.is_dir():
        raise PlanError(str(folder), "no such directory", "pass the checkpoint directory of a run")
    paths = checkpoints(folder) or [path for path in sorted(folder.iterdir()) if (path / MANIFEST).is_file()]
    rows = [row_of(path) for path in paths]
    left = sorted(path.name for path in folder.iterdir() if marked(path, PART))
    if args.json:
        print(json.dumps({"checkpoints": rows, "unfinished": left}, indent=1))
        return 0
    for row in rows:
        print(
            f"{row['name']}   step {row['step']}   {count_text(row['bytes'], 'B')}   {row['mesh']}   {row['written']}"
        )
    for name in left:
        print(f"{name}   unfinished save (still running, or interrupted)")
    if not rows and not left:
        print(f"{folder}: no checkpoints")
    return 0


def row_of(path: Path) -> dict[str, Any]:
    opened = open_checkpoint(path)
    about = opened.manifest.about
    written = datetime.fromtimestamp((opened.path / MANIFEST).stat().st_mtime)
    return {
        "name": path.name,
        "step": about.get("steps"),
        "bytes": file_bytes(opened.manifest),
        "mesh": mesh_text(about),
        "written": written.isoformat(sep=" ", timespec="seconds"),
    }


def mesh_text(about: dict[str, Any]) -> str:
    return " ".join(f"{name}={degree}" for name, degree in about.get("mesh", {}).items() if name != "order")


def file_bytes(manifest: Manifest) -> int:
    return sum(record["bytes"] for record in manifest.files.values())


def show(args: Namespace) -> int:
    """Print the contents of a checkpoint."""
    opened = open_any(args.folder)
    facts = facts_of(opened)
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    for name, value in facts.items():
        lines = value if isinstance(value, list) else [value]
        for number, line in enumerate(lines):
            print(f"{'' if number else name:12} {line}")
    return 0


def facts_of(opened: Checkpoint) -> dict[str, Any]:
    """Return the facts about a checkpoint that `show` prints, by name."""
    manifest = opened.manifest
    about = manifest.about
    weights = [manifest.tensors[name] for name in dict.fromkeys(opened.names.values())]
    moments = [record for name, record in manifest.tensors.items() if not name.startswith(MODEL)]
    facts: dict[str, Any] = {"folder": str(opened.path)}
    if "steps" in about:
        facts |= {
            "step": about["steps"],
            "mesh": mesh_text(about),
            "torch": about["torch"],
            "seed": about["seed"],
        }
        given = {key: value for key, value in about["options"].items() if key in ("precision", "zero", "v")}
        facts["options"] = " ".join(f"{key}={value}" for key, value in given.items())
    elif "source" in about:
        facts["written by"] = f"autoptd checkpoint convert, from {about['source']}"
    else:
        facts["written by"] = "another program, through torch.distributed.checkpoint"
    facts["model"] = (
        f"{sum(map(numel, weights)):,} parameters and buffers, {count_text(sum(map(nbytes, weights)), 'B')}"
    )
    if manifest.optimizer is not None:
        facts["optimizer"] = (
            f"{manifest.optimizer['class'] or 'unknown class'}, {count_text(sum(map(nbytes, moments)), 'B')}"
        )
        facts["groups"] = [group_text(group) for group in manifest.optimizer["groups"]]
    if manifest.files:
        facts["files"] = f"{len(manifest.files)} of {count_text(file_bytes(manifest), 'B')}"
    if about.get("losses"):
        facts["last losses"] = " ".join(f"{loss:.4f}" for loss in about["losses"][-5:])
    return facts


def numel(record: TensorRecord) -> int:
    return torch.Size(record.shape).numel()


def nbytes(record: TensorRecord) -> int:
    return numel(record) * dtype_of(record.dtype).itemsize


def group_text(group: dict[str, Any]) -> str:
    settings = {key: decode(value) for key, value in group.items() if key != "params" and value is not None}
    return f"{len(group['params'])} parameters: " + ", ".join(
        f"{key}={value}" for key, value in settings.items()
    )


def verify(args: Namespace) -> int:
    """Read all files and print those that changed; return 1 if any did."""
    with activity("reading all files"):
        findings = verify_files(args.folder)
    if args.json:
        print(json.dumps({"findings": findings}))
    else:
        for finding in findings:
            print(finding)
        if not findings:
            opened = open_checkpoint(args.folder)
            print(f"{opened.path}: all {count_text(file_bytes(opened.manifest), 'B')} match their checksums")
    return 1 if findings else 0


def convert(args: Namespace) -> int:
    """Convert from or to another format."""
    if args.to and args.source:
        raise PlanError(
            "--to and --from", "exclude each other", "convert in one direction first, then in the other"
        )
    if not (args.to or args.source) or args.out is None:
        missing = "--out" if args.to or args.source else "--to or --from"
        raise PlanError(missing, "is missing", "for example: --to hf --out weights")
    out = Path(args.out)
    # Also true for a dangling symlink.
    if os.path.lexists(out):
        raise PlanError(f"--out {out}", "already exists", "choose another path, or remove it")
    if args.source:
        content = {"torch": from_torch, "hf": from_hf}[args.source](Path(args.folder))
        with activity(f"writing {out}"):
            write_checkpoint(content, out)
        if content.left:
            print(f"skipped: {', '.join(content.left)}")
    elif args.to == "torch":
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state_dicts(open_any(args.folder), out), out)
    else:
        write_weights(open_any(args.folder), out)
    print(f"{out}: written")
    return 0


def write_weights(opened: Checkpoint, out: Path) -> None:
    """Write a directory with model.safetensors; a tied parameter is stored once, under its first name."""
    tensors = {
        name.removeprefix(MODEL): opened.manifest.tensors[name]
        for name in dict.fromkeys(opened.names.values())
    }
    kinds = {name: dtype_in_model(opened.manifest, name, record) for name, record in tensors.items()}
    part = out.with_name(f"{out.name}{PART}convert")
    remove_folder(part)
    part.mkdir(parents=True)

    def values() -> Iterator[torch.Tensor]:
        for name in tensors:
            yield opened.reader().tensor(fqn(name, "")).to(kinds[name])

    shapes = {name: (kinds[name], record.shape) for name, record in tensors.items()}
    write_safetensors(part / SINGLE, shapes, values())
    rename(part, out)


def dtype_in_model(manifest: Manifest, name: str, record: TensorRecord) -> torch.dtype:
    """Return the dtype of a parameter in the model; the checkpoint may store it in a wider one."""
    entry = manifest.about.get("model", {}).get(name)
    return dtype_of(entry["dtype"] if entry else record.dtype)


def state_dicts(opened: Checkpoint, out: Path) -> dict[str, Any]:
    """Return {"model": ..., "optimizer": ...} as full tensors by name, backed by scratch files next to `out`."""
    manifest, reader = opened.manifest, opened.reader()
    model: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    for name, home in opened.names.items():
        if home not in shared:
            dtype = dtype_in_model(manifest, home.removeprefix(MODEL), manifest.tensors[home])
            shared[home] = spilled(reader.tensor(home).to(dtype), out)
        model[name] = shared[home]
    found: dict[str, Any] = {"model": model}
    if manifest.optimizer is not None:
        state: dict[str, dict[str, Any]] = {}
        for name, keys in manifest.state.items():
            state[name] = {key: spilled(reader.tensor(fqn(name, key)), out) for key in keys}
        for name, values in manifest.values.items():
            state.setdefault(name, {}).update({key: decode(value) for key, value in values.items()})
        groups = []
        for group in manifest.optimizer["groups"]:
            groups.append({key: decode(value) for key, value in group.items()})
        found["optimizer"] = {"state": state, "param_groups": groups}
    return found


def spilled(x: torch.Tensor, out: Path) -> torch.Tensor:
    """Return a copy backed by an unlinked file, whose pages the OS can evict; a small tensor is
    returned unchanged.
    """
    if x.nbytes < SMALL_BYTES:
        return x
    file = out.with_name(f"{out.name}{PART}convert")
    remove_file(file)
    # Through an untyped storage, as not every dtype can be mapped.
    storage = torch.UntypedStorage.from_file(str(file), shared=True, nbytes=x.nbytes)
    remove_file(file)
    copy = torch.empty(0, dtype=x.dtype, device="cpu").set_(storage, 0, x.shape)  # type: ignore[call-overload]
    return copy.copy_(x)  # type: ignore[no-any-return]
