"""Cache programs for other sizes on disk between runs, in a folder given by the user.

In: the traces of a program, and everything else that determines it. Out: the program that an earlier run
wrote for exactly these, else None. An entry is a folder as `Program.save` writes it, with a list of its
files' hashes, under the hash of

- the traced graphs with all their notes, the shapes and dtypes, and the values of all buffers;
- the options, the batch, the machine of the cost model, and the program that the new one follows;
- the versions: every source file of this package, torch, Python.

An incomplete or modified entry is not used, with a warning, and written again. An entry contains Python code
that is executed, so use a folder that other users cannot write to. Only tensors are unpickled
(`weights_only`).

    cache = ProgramCache("programs/")
    key = cache.key(traces, batch, ctx, handed)
    program = cache.load(key, buffers) or compiled(...)
    cache.store(key, program)
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.compiler.batch import Batch
from autoptd.compiler.request import Traces
from autoptd.ir.buffers import digest
from autoptd.ir.notes import note, op_name, ops, value
from autoptd.options import settings
from autoptd.passes.context import Context
from autoptd.program.program import Program

MANIFEST = "files.json"
# Origins of operators whose code is identified by versions; "" is Python's `getitem`.
KNOWN = {"aten", "prims", "autoptd", ""}
# Options that do not affect a program, or only through its traces.
ELSEWHERE = {"loss_fn", "timeout", "nan", "check_every", "shapes", "max_programs", "program_cache", "machine"}


class ProgramCache:
    """The programs in a folder, by key; the key "" matches nothing."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def key(self, traces: Traces, batch: Batch, ctx: Context, handed: Mapping[str, torch.dtype]) -> str:
        """Return the hash of everything that a program depends on; "" if that includes code that cannot be
        hashed.

        That is the code of operators from outside of torch, which are probed by running them.
        """
        captured = traces.captured
        if not {op_name(node).rpartition(".")[0] for node in ops(captured.graph)} <= KNOWN:
            return ""
        state = hashlib.sha256()
        for text in _graph_texts(captured.graph):
            state.update(text.encode())
        updates = traces.updates
        for other in (traces.whole, updates.graph if updates is not None else None):
            for text in _graph_texts(other) if other is not None else ():
                state.update(text.encode())
        # Buffers that forward updates have different values at every step.
        constants = {
            name: x for name, x in captured.buffers.items() if not (updates and name in updates.buffers)
        }
        like = ctx.like
        decided = (
            {name: each for name, each in settings(ctx.options).items() if name not in ELSEWHERE},
            ctx.options.rank_machine,
            batch,
            captured.aliases,
            sorted(captured.persistent),
            (captured.inputs, captured.constants, captured.tree, captured.checkpointed),
            {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in captured.parameters.items()},
            sorted((name, digest(x)) for name, x in constants.items()),
            sorted((name, tuple(x.shape), x.dtype) for name, x in captured.buffers.items()),
            updates and (updates.buffers, updates.of_batch, updates.sums),
            sorted((name, str(dtype)) for name, dtype in handed.items()),
            ctx.orders,
            like and (like.fingerprint(), json.dumps(like.plan, sort_keys=True)),
            (own_sources(), torch.__version__, platform.python_version()),
        )
        state.update(repr(decided).encode())
        return state.hexdigest()[:32]

    def load(self, key: str, buffers: Mapping[str, torch.Tensor]) -> Program | None:
        """Return the program of a key with these buffer values, if the entry exists and is complete."""
        folder = self.folder / key
        if not key or not folder.is_dir():
            return None
        try:
            if json.loads((folder / MANIFEST).read_text()) != hashes_of(folder):
                raise ValueError("its files are not those that were written")
            program = Program.load(folder)
            return replace(program, buffers={name: buffers[name].detach() for name in program.buffers})
        except Exception as error:
            # Ignore any error of the entry, as the program can be compiled.
            warnings.warn(f"{folder} is not used, and will be written again: {error}", stacklevel=2)
            return None

    def store(self, key: str, program: Program) -> None:
        """Write a program that `load` restores unchanged; one that cannot be restored is not cached."""
        # Write in the first process of a machine only, since the others have the same program.
        if not key or program.unlisted or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        made = self.folder / f".{key}-{os.getpid()}"
        try:
            program.save(made)
            # Some constants do not survive a JSON round trip.
            if Program.load(made).fingerprint() != program.fingerprint():
                return
            (made / MANIFEST).write_text(json.dumps(hashes_of(made)))
            final = self.folder / key
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
        except (OSError, TypeError, ValueError) as error:
            warnings.warn(f"no program was kept in {self.folder}: {error}", stacklevel=2)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the hash of every file of an entry except the list of hashes."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST and path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _graph_texts(graph: Graph) -> Iterator[str]:
    """Yield every node with its operands, the shape and dtype of its value, and its note."""
    for node in graph.nodes:
        made = [(x.shape, x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x for x in _values(node)]
        yield f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {made} {note(node)}\n"


def _values(node: Node) -> tuple[Any, ...]:
    """Return the fake values of a node."""
    made = value(node)
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


@cache
def own_sources() -> str:
    """Return the hash of this package's source files: a version may be a working copy."""
    state, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        state.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return state.hexdigest()


__all__ = ["ProgramCache"]
