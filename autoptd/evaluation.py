"""The program that evaluates: on the ranks and the parameters of the one that trains.

In: a model, the call of an `eval_step`, and the program that trains. Out: a program whose parameters lie, whose layers are
cut and whose stages are sent between as in training. Where eval mode only takes the dropouts away, and the sizes are those of
training, that is training's program itself, which draws no masks without gradients; for other sizes it is compiled again,
held to training's layout and cut, and so is a model that computes something else in eval mode.

    program = compile_evaluation(model, options, args, kwargs, trained, modes, replicas=1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from autoptd import trace as tracing
from autoptd.batch import plan_batch
from autoptd.compat import tree_flatten
from autoptd.compile import capture_rows, compile_program
from autoptd.errors import PlanError
from autoptd.ir.notes import note
from autoptd.ir.plan import Plan
from autoptd.options import Options
from autoptd.placing import layouts_of
from autoptd.program.program import Program
from autoptd.runtime.batch import expected_shape, is_same_constant

Modes = Mapping[nn.Module, bool]
REMEDY = "let forward differ by dropouts alone in eval mode, or evaluate the unmodified model with pm.state_dict()"


def compile_evaluation(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trained: Program,
    modes: Modes,
    *,
    replicas: int,
) -> Program:
    """Compile for an evaluation of `(args, kwargs)`; `modes` are those of the modules in training, None stands for training's
    own.

    PlanError where eval mode draws dropouts, or reads parameters elsewhere than training does.
    """
    options = held_to(options, trained)
    batch = plan_batch(options, args, kwargs, replicas)
    with evaluating(model):
        evaluated = capture_rows(model, options, args, kwargs, batch)
        for node in tracing.dropouts(evaluated.graph):
            fact = f"dropout of {node.args[1]} is drawn in eval mode as well"
            raise PlanError(note(node).module or "model", fact, "F.dropout(x, p, training=self.training)")
    is_same_size = has_sizes_of(trained, args, kwargs, replicas)
    with in_modes(modes):
        if is_same_size:
            graph, buffers = trained.graphs["TRACED"], trained.buffers
        else:
            captured = capture_rows(model, options, args, kwargs, batch)
            graph, buffers = captured.graph, captured.buffers
        is_training = tracing.is_training_without_dropout(graph, evaluated.graph, buffers, evaluated.buffers)
        if is_training and is_same_size:
            return trained
    with in_modes(modes) if is_training else evaluating(model):
        program = compile_program(model, options, args, kwargs, replicas=replicas, check=False, like=trained)
    check_placement(trained, program)
    return replace(program, params=trained.params)


def held_to(options: Options, trained: Program) -> Options:
    """The options for a program that follows `trained`: its price of memory, and no bound, as nothing is kept for backward."""
    price = trained.plan["options"]["memory_price"]
    return replace(options, memory=math.inf, memory_price=price, plan=Plan())


def has_sizes_of(trained: Program, args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int) -> bool:
    """Whether a call is one that the training program takes."""
    leaves, tree = tree_flatten((args, kwargs))
    if str(tree) != trained.tree or not all(is_same_constant(leaves[leaf], value) for leaf, value in trained.constants):
        return False
    pairs = ((leaves[spec.leaf], spec) for spec in trained.inputs)
    return all(
        tuple(x.shape) == expected_shape(trained, spec, replicas) and str(x.dtype) == f"torch.{spec.dtype}"
        for x, spec in pairs
    )


def check_placement(trained: Program, evaluated: Program) -> None:
    """PlanError unless every parameter of `evaluated` is where `trained` has it, and its calls go where there are groups."""
    before, after = layouts_of(trained), layouts_of(evaluated)
    for spec in evaluated.params:
        read = {stage.index for stage in evaluated.stages if set(spec.aliases) & set(stage.params)}
        elsewhere = sorted(read - set(trained.param(spec.name).stages))
        if elsewhere:
            fact = f"eval mode reads it in stage {elsewhere[0]}, where training does not"
            raise PlanError(f"eval_step: {spec.name}", fact, REMEDY)
        if read and before[spec.name] != after[spec.name]:
            raise PlanError(f"eval_step: {spec.name}", "eval mode shards it in another way than training", REMEDY)
    if unknown := sorted(set(evaluated.sub_axes) - set(trained.sub_axes)):
        fact = f"eval mode communicates over {unknown[0]}, where training does not"
        raise PlanError("eval_step", fact, REMEDY)
    known = _links(trained)
    for source, target in sorted(_links(evaluated) - known):
        fact = f"eval mode sends from pipeline rank {source} to {target}, where training sends nothing"
        raise PlanError("eval_step", fact, REMEDY)


def _links(program: Program) -> set[tuple[int, int]]:
    """(source, target) pipeline ranks of everything that travels forward."""
    pairs = {(one.source, target) for one in program.crossings for target in one.targets}
    ranks = {(program.rank_of_stage(source), program.rank_of_stage(target)) for source, target in pairs}
    return {(source, target) for source, target in ranks if source != target}


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Whether each module is in training mode."""
    return {module: module.training for module in model.modules()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode for a while, as `torch.no_grad()` would have it."""
    with in_modes(dict.fromkeys(model.modules(), False)), tracing.seen_as_evaluation():
        yield


@contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """These modules in these modes for a while; each gets its own back."""
    before = {module: module.training for module in modes}
    for module, mode in modes.items():
        module.training = mode
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


__all__ = ["check_placement", "compile_evaluation", "in_modes", "modes_of"]
