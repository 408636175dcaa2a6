"""Check that a program can run on the ranks and parameters of another: an evaluation on those of training, or
training for batches of other sizes.

In: the training program, and another one for evaluation or training. Out: nothing, or a PlanError that names
the first difference.

    check_follows(trained, evaluated)
    check_trains_alike(trained, longer)
"""

from __future__ import annotations

from collections.abc import Callable

from autoptd.errors import PlanError
from autoptd.program.buckets import plan_buckets
from autoptd.program.program import Program
from autoptd.program.specs import CrossingSpec

REMEDY = (
    "let forward differ by dropouts alone in eval mode, or evaluate the unmodified model with pm.state_dict()"
)


def layouts_of(program: Program) -> dict[str, tuple[object, ...]]:
    """Return the element layout of every parameter, by its first name."""
    return {spec.name: spec.element_layout(program.mesh) for spec in program.params}


def check_follows(trained: Program, evaluated: Program) -> None:
    """Raise PlanError unless `evaluated` shards parameters like `trained` and needs no new groups or
    channels.
    """
    before, after = layouts_of(trained), layouts_of(evaluated)
    for spec in evaluated.params:
        # Check the stages that really read it: the program may list more.
        read = {stage.index for stage in evaluated.stages if set(spec.aliases) & set(stage.params)}
        elsewhere = sorted(read - set(trained.param(spec.name).stages))
        if elsewhere:
            fact = f"eval mode reads it in stage {elsewhere[0]}, where training does not"
            raise PlanError(f"eval_step: {spec.name}", fact, REMEDY)
        if read and before[spec.name] != after[spec.name]:
            raise PlanError(
                f"eval_step: {spec.name}", "eval mode shards it in another way than training", REMEDY
            )
        # Under autocast, parameters that training reads only in 16 bits exist only in 16 bits.
        ours, theirs = trained.param(spec.name).use.dtype, spec.use.dtype
        if read and ours != theirs:
            fact = (
                f"eval mode reads it as {theirs}, training as {ours}: a rank has the one that training reads"
            )
            raise PlanError(f"eval_step: {spec.name}", fact, REMEDY)
    if unknown := sorted(set(evaluated.sub_axes) - set(trained.sub_axes)):
        fact = f"eval mode communicates over {unknown[0]}, where training does not"
        raise PlanError("eval_step", fact, REMEDY)
    # Channels were created for training, for values and their gradients; a new one needs all ranks to create
    # its group.
    known = _links(trained) | {(target, source) for source, target in _links_back(trained)}
    for source, target in sorted(_links(evaluated) - known):
        fact = f"eval mode sends from pipeline rank {source} to {target}, where training sends nothing"
        raise PlanError("eval_step", fact, REMEDY)


def check_trains_alike(trained: Program, other: Program) -> None:
    """Raise PlanError unless `other` trains the same stored parameters as `trained`, on the same channels."""
    homes = {spec.name: spec for spec in trained.params}
    before, after = layouts_of(trained), layouts_of(other)
    for spec in other.params:
        home = homes.get(spec.name)
        if home is None:
            raise PlanError(spec.name, "is read, which it is not in the first program", OTHER_SIZES)
        facts = {
            "is read in other stages": home.stages != spec.stages,
            "is sharded in another way": before[spec.name] != after[spec.name],
            "is stored in another way": home.storage != spec.storage or home.has_master != spec.has_master,
            "is trained or frozen otherwise": home.requires_grad != spec.requires_grad,
            f"is read in another dtype ({spec.use.dtype})": home.use.dtype != spec.use.dtype,
        }
        for fact, is_so in facts.items():
            if is_so:
                raise PlanError(spec.name, f"{fact} than in the first program", OTHER_SIZES)
    if unread := sorted(homes.keys() - {spec.name for spec in other.params}):
        raise PlanError(unread[0], "is not read, which it is in the first program", OTHER_SIZES)
    if trained.row_blocks != other.row_blocks:
        fact = (
            f"rows of {other.row_blocks} blocks belong together, of {trained.row_blocks} in the first program"
        )
        raise PlanError("batch", fact, OTHER_SIZES)
    for pipeline_rank in range(trained.mesh.pipeline_ranks):
        if _shared(trained, pipeline_rank) != _shared(other, pipeline_rank):
            fact = "gradients are summed over other ranks than in the first program, by which replicas share storage"
            raise PlanError("zero=1", fact, "zero=0, or sizes that divide like those of example_inputs")
    if unknown := sorted(set(other.sub_axes) - set(trained.sub_axes)):
        raise PlanError(
            "mesh", f"ranks communicate over {unknown[0]}, for which they have no group", OTHER_SIZES
        )
    for get in (_links, _links_back):
        if new := sorted(get(other) - get(trained)):
            fact = f"pipeline rank {new[0][0]} sends to {new[0][1]}, to which it has no channel"
            raise PlanError("stages", fact, OTHER_SIZES)


OTHER_SIZES = "other sizes, or a separate run for each"


def _shared(program: Program, pipeline_rank: int) -> set[tuple[object, ...]]:
    """Return the positions of parameters in the flat buffers that replicas share."""
    plans = plan_buckets(program.params, program.orders, program.ranks, program.mesh, pipeline_rank)
    found: set[tuple[object, ...]] = set()
    for plan in plans:
        if plan.sharing_axes:
            places = plan.places(program.mesh)
            found.add(tuple((place.spec.name, place.start, place.end) for place in places))
    return found


def _links_back(program: Program) -> set[tuple[int, int]]:
    """Return the pairs of pipeline ranks that gradients are sent between."""
    return _links(program, lambda crossing: crossing.has_grad)


def _links(
    program: Program, counts: Callable[[CrossingSpec], bool] = lambda crossing: True
) -> set[tuple[int, int]]:
    """Return the pairs (source, target) of pipeline ranks that send the selected values in forward."""
    links = set()
    for crossing in filter(counts, program.crossings):
        source = program.rank_of_stage(crossing.source)
        for stage in crossing.targets:
            target = program.rank_of_stage(stage)
            # Between chunks of one rank (v > 1) tensors are passed on.
            if source != target:
                links.add((source, target))
    return links


__all__ = ["check_follows", "check_trains_alike", "layouts_of"]
