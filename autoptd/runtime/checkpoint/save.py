"""Save a checkpoint, all ranks at once: `pm.save`, and the parts of it that may run apart from training.

In: this process's description of the run (`Contents`), and each rank's parameters. Out: a committed folder,
or the same error on all ranks. Training has to pause only for the first of three functions:

    staged = stage_rank(params, contents, copied)     # on the rank's thread: copies the current tensors
    write_share(part, staged, contents)               # any thread: files, and a report for the rank that commits
    commit(part, folder, ranks, contents, extra)      # any thread of rank 0, when all reports are there

They communicate through the folder alone; `save_rank` adds the collectives by which ranks agree, one after
each of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.ir.mesh import DEGREES, Mesh
from autoptd.ir.notes import note, op_name, ops, shape
from autoptd.ir.operators.record import argument, operands
from autoptd.ir.scopes import paused_collection
from autoptd.ir.types import Segmented
from autoptd.options import Options, settings
from autoptd.program.module_hashes import prints_of
from autoptd.program.program import Program
from autoptd.runtime.checkpoint.commit import begin, finish, new_token, part_of, path_of, sweep
from autoptd.runtime.checkpoint.extra import merged
from autoptd.runtime.checkpoint.restore import agree
from autoptd.runtime.checkpoint.stage import Copy, OptimizerState, Staged, StagedTensor, shown, stage
from autoptd.runtime.checkpoint.write import write_rank
from autoptd.runtime.folders.disk import remove_folder
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.world.world import World

SITE = "pm.save"


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint besides parameters: description of the run, groups, buffers, states.

    `names` maps the first name of each tied parameter to all its names. `own_state` returns the bytes of this
    process (`extra.own_state`); it may raise.
    """

    about: Mapping[str, Any]
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: OptimizerState | None = None


def with_losses(contents: Contents, losses: Iterable[torch.Tensor]) -> Contents:
    """Return the contents with the last losses, for which a device is waited for."""
    return replace(contents, about={**contents.about, "losses": [float(loss) for loss in losses]})


def about_program(program: Program, options: Options) -> dict[str, Any]:
    """Return what a checkpoint says of the program and the request that it was compiled for."""
    return {
        "torch": torch.__version__,
        "seed": program.seed,
        "mesh": {**{name: getattr(program.mesh, name) for name in DEGREES}, "order": program.mesh.order},
        "options": {key: str(value) for key, value in settings(options).items() if value is not None},
        "names": tied_names(program),
        "model": about_model(program),
        "prints": prints_of(program),
    }


def about_model(program: Program) -> dict[str, Any]:
    """Return what a checkpoint says of the parameters: their atoms, and in which dtype they were used.

    A dim that is read in slices, such as learned positions, has atoms that depend on the tokens of a batch:
    it counts as one atom.
    """
    entries, sliced = {}, sliced_dims(program)
    for spec in program.params:
        dims = [atom_sizes(atoms) for atoms in spec.model_dims or spec.dims]
        for dim in sliced.get(spec.name, ()):
            dims[dim] = [spec.shape[dim]]
        entries[spec.name] = {"dims": dims, "use": spec.use.dtype, "dtype": spec.dtype}
    return entries


def sliced_dims(program: Program) -> dict[str, set[int]]:
    """Return the dims of parameters that operators read a slice of, by name."""
    graph = program.graphs.get("TRACED")
    found: dict[str, set[int]] = {}
    for node in ops(graph) if graph is not None else ():
        if op_name(node) == "aten.slice" and note(source := operands(node)[0]).kind == "param":
            found.setdefault(note(source).name, set()).add(int(argument(node, "dim")) % len(shape(source)))
    return found


def atom_sizes(atoms: Sequence[int]) -> list[Any]:
    """Return the atoms of a dim, of a segmented one the sizes of its segments."""
    return [atom.blocks if isinstance(atom, Segmented) else atom for atom in atoms]


def tied_names(program: Program) -> dict[str, list[str]]:
    """Return all names of the parameters that have several, by the first one."""
    return {spec.name: list(spec.aliases) for spec in program.params if len(spec.aliases) > 1}


def stage_rank(params: RankParameters, contents: Contents, copy: Copy = shown) -> Staged:
    """Collect what a rank writes; rank 0 has the buffers."""
    staged = stage(params, contents.state, copy)
    if params.world.rank == 0:
        for name, x in contents.buffers.items():
            staged.tensors.append(StagedTensor(name, "", tuple(x.shape), (0,) * x.dim(), copy(x.detach())))
    return staged


def write_share(part: Path, staged: Staged, contents: Contents) -> None:
    """Write what a rank staged, and leave its report."""
    write_rank(part, staged, contents.objects if staged.rank == 0 else {})


def commit(part: Path, folder: Path, ranks: Sequence[int], contents: Contents, extra: bytes) -> list[str]:
    """Make the folder a checkpoint, when `ranks` have left their reports; then remove what earlier saves of it left.

    What cannot be removed is returned: the checkpoint is complete all the same.
    """
    with paused_collection():
        finish(part, folder, ranks, contents.about, contents.names, extra)
    return sweep(folder)


def text_of_left(folder: Path, left: Sequence[str]) -> str:
    """Say that a save has succeeded, and what it could not remove."""
    return (
        f"{folder} is saved and complete; what is not needed any more could not be removed: {', '.join(left)}"
    )


def save_rank(
    params: RankParameters, where: str | Path, prepare: Callable[[], tuple[Contents, bytes | None]]
) -> None:
    """Save; a collective of all ranks. `prepare` returns what this process adds, and its bytes of `extra.pt`, if any."""
    world, folder = params.world, path_of(where, SITE)
    token, first = world.everyone().gather_objects((new_token(), str(folder)), SITE)[0]
    contents, own = agree(world, SITE, partial(_prepared, prepare, folder, first))
    part = part_of(folder, token)
    agree(world, SITE, partial(begin, folder, token) if world.rank == 0 else _nothing)
    try:
        agree(world, SITE, lambda: _write(part, params, contents))
        agree_on_commit(world, part, folder, contents, own)
    except BaseException:
        # No rank is still writing: all of them took part in the failed call.
        if world.rank == 0:
            # A second failure follows from the first; the next save removes the rest.
            with suppress(OSError):
                remove_folder(part)
        raise


def agree_on_commit(world: World, part: Path, folder: Path, contents: Contents, own: bytes | None) -> None:
    """Let rank 0 commit with the states of all processes; a collective."""
    replicas = replicas_of_states(world.mesh)
    states = world.everyone().gather_objects(own, SITE)
    found = [(data, replicas[rank]) for rank, data in enumerate(states) if data is not None]

    def act() -> None:
        if world.rank == 0:
            extra = merged([data for data, _ in found], [replica for _, replica in found])
            if left := commit(part, folder, range(world.mesh.size), contents, extra):
                warnings.warn(f"{SITE}: {text_of_left(folder, left)}", stacklevel=2)

    agree(world, SITE, act)


def replicas_of_states(mesh: Mesh) -> dict[int, int]:
    """Return for each rank the replica whose extra states it hands in, -1 where another rank does."""
    others = (*mesh.value_axes, *mesh.stage_axes)
    found = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        leads = not any(coordinate[axis] for axis in others)
        found[rank] = mesh.replica_of(rank) if leads else -1
    return found


def _prepared(
    prepare: Callable[[], tuple[Contents, bytes | None]], folder: Path, first: str
) -> tuple[Contents, bytes | None]:
    if str(folder) != first:
        raise PlanError(SITE, f"got the folder {str(folder)!r}, and rank 0 {first!r}", "one folder for all")
    return prepare()


def _write(part: Path, params: RankParameters, contents: Contents) -> None:
    if not part.is_dir():
        fact = f"rank 0 has made {str(part)!r}, and it is not there"
        raise PlanError(SITE, fact, "a folder that all nodes share")
    write_share(part, stage_rank(params, contents), contents)


def _nothing() -> None:
    """What the other ranks do meanwhile."""


__all__ = [
    "Contents",
    "about_model",
    "about_program",
    "commit",
    "replicas_of_states",
    "save_rank",
    "stage_rank",
    "text_of_left",
    "tied_names",
    "with_losses",
    "write_share",
]
