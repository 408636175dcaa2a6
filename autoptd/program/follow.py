"""Whether a program can run on the ranks and the parameters of another: an evaluation on those of training.

In: the program that trains, and one that evaluates. Out: nothing, or a PlanError with what lies elsewhere.

    check_follows(trained, evaluated)
"""

from __future__ import annotations

from autoptd.errors import PlanError
from autoptd.program.program import Program

REMEDY = (
    "let forward differ by dropouts alone in eval mode, or evaluate the unmodified model with pm.state_dict()"
)


def layouts_of(program: Program) -> dict[str, tuple[object, ...]]:
    """Where the elements of every parameter lie on the ranks, by its first name."""
    return {spec.name: spec.element_layout(program.mesh) for spec in program.params}


def check_follows(trained: Program, evaluated: Program) -> None:
    """PlanError unless every parameter of `evaluated` is where `trained` has it, and its calls go where groups are."""
    before, after = layouts_of(trained), layouts_of(evaluated)
    for spec in evaluated.params:
        read = {stage.index for stage in evaluated.stages if set(spec.aliases) & set(stage.params)}
        elsewhere = sorted(read - set(trained.param(spec.name).stages))
        if elsewhere:
            fact = f"eval mode reads it in stage {elsewhere[0]}, where training does not"
            raise PlanError(f"eval_step: {spec.name}", fact, REMEDY)
        if read and before[spec.name] != after[spec.name]:
            raise PlanError(
                f"eval_step: {spec.name}", "eval mode shards it in another way than training", REMEDY
            )
    if unknown := sorted(set(evaluated.sub_axes) - set(trained.sub_axes)):
        fact = f"eval mode communicates over {unknown[0]}, where training does not"
        raise PlanError("eval_step", fact, REMEDY)
    known = _links(trained)
    for source, target in sorted(_links(evaluated) - known):
        fact = f"eval mode sends from pipeline rank {source} to {target}, where training sends nothing"
        raise PlanError("eval_step", fact, REMEDY)


def _links(program: Program) -> set[tuple[int, int]]:
    """(source, target) pipeline ranks of everything that travels forward."""
    pairs = {(crossing.source, target) for crossing in program.crossings for target in crossing.targets}
    ranks = {(program.rank_of_stage(source), program.rank_of_stage(target)) for source, target in pairs}
    return {(source, target) for source, target in ranks if source != target}


__all__ = ["check_follows", "layouts_of"]
