"""Check that a program can run on the ranks and parameters of another: an evaluation on those of training.

In: the program that trains, and one that evaluates. Out: nothing, or a PlanError that names the first difference.

    check_follows(trained, evaluated)
"""

from __future__ import annotations

from autoptd.errors import PlanError
from autoptd.program.program import Program

REMEDY = (
    "let forward differ by dropouts alone in eval mode, or evaluate the unmodified model with pm.state_dict()"
)


def layouts_of(program: Program) -> dict[str, tuple[object, ...]]:
    """Return the element layout of every parameter, by its first name."""
    return {spec.name: spec.element_layout(program.mesh) for spec in program.params}


def check_follows(trained: Program, evaluated: Program) -> None:
    """Raise PlanError unless `evaluated` shards every parameter as `trained` does, and has no other groups or channels."""
    before, after = layouts_of(trained), layouts_of(evaluated)
    for spec in evaluated.params:
        # Of its stages, those that really read it: the program may list it for more.
        read = {stage.index for stage in evaluated.stages if set(spec.aliases) & set(stage.params)}
        elsewhere = sorted(read - set(trained.param(spec.name).stages))
        if elsewhere:
            fact = f"eval mode reads it in stage {elsewhere[0]}, where training does not"
            raise PlanError(f"eval_step: {spec.name}", fact, REMEDY)
        if read and before[spec.name] != after[spec.name]:
            raise PlanError(
                f"eval_step: {spec.name}", "eval mode shards it in another way than training", REMEDY
            )
        # Under autocast, what training reads in 16 bits alone is there in 16 bits.
        ours, theirs = trained.param(spec.name).use.dtype, spec.use.dtype
        if read and ours != theirs:
            fact = (
                f"eval mode reads it as {theirs}, training as {ours}: a rank has the one that training reads"
            )
            raise PlanError(f"eval_step: {spec.name}", fact, REMEDY)
    if unknown := sorted(set(evaluated.sub_axes) - set(trained.sub_axes)):
        fact = f"eval mode communicates over {unknown[0]}, where training does not"
        raise PlanError("eval_step", fact, REMEDY)
    # Channels were made for training; another one would need all ranks to make its group together.
    known = _links(trained)
    for source, target in sorted(_links(evaluated) - known):
        fact = f"eval mode sends from pipeline rank {source} to {target}, where training sends nothing"
        raise PlanError("eval_step", fact, REMEDY)


def _links(program: Program) -> set[tuple[int, int]]:
    """Return the pairs (source, target) of pipeline ranks that values are sent between in forward."""
    links = set()
    for crossing in program.crossings:
        source = program.rank_of_stage(crossing.source)
        for stage in crossing.targets:
            target = program.rank_of_stage(stage)
            # Between chunks of one rank (v > 1) tensors are passed on.
            if source != target:
                links.add((source, target))
    return links


__all__ = ["check_follows", "layouts_of"]
