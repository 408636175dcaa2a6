"""Run one saved stage alone: `python out/stage_0.py --check`.

In: the class of an emitted file, and the folder that `program.save` wrote it to. Out: its inputs, outputs and gradients,
printed. Its t tensor ranks run as threads, on random parameters, crossings and floating-point inputs, and integer inputs
of 0 and 1; then the sum of the outputs is differentiated. Without `--check` the file prints its docstring.

    check_stage(Stage0, "out").lines    # the printed lines
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from autoptd.errors import AutoptdError, InternalError, PlanError
from autoptd.program.program import Program
from autoptd.program.specs import StageSpec
from autoptd.runtime.ops.linear import WeightTerm
from autoptd.runtime.step.per_step import set_batch_sums
from autoptd.runtime.step.stage import Stage, give_layers, load_layers
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World

# The standard deviation of random parameters, so small that values stay finite over many layers.
SCALE = 0.02


def main(stage: type[Stage], file: str, arguments: Sequence[str] | None = None) -> None:
    """Run an emitted file as a program; exits with 0 (success), 1 (failure) or 2 (unknown flag)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given != ["--check"]:
        print(sys.modules[stage.__module__].__doc__ or stage.__name__)
        print(f"python {file} --check runs this stage alone on random inputs.")
        sys.exit(2 if given else 0)
    try:
        check = check_stage(stage, Path(file).parent)
    except AutoptdError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print("\n".join(check.lines))
    if check.wrong:
        sys.exit(f"{stage.__name__}: {'; '.join(check.wrong)}")


class Check(NamedTuple):
    """The result of a check: lines to print, and the faults of any rank (none if all is well)."""

    lines: list[str]
    wrong: list[str]


def check_stage(stage: type[Stage], folder: str | Path, timeout: float = 60.0) -> Check:
    """Run a stage forward and backward; check that all values and gradients exist and are finite.

    PlanError where program.json is missing or has no such stage.
    """
    if not (Path(folder) / "program.json").is_file():
        raise PlanError(
            f"{folder}/program.json", "is missing", "run the file in the folder that program.save wrote"
        )
    program = Program.load(folder)
    index = int(stage.__name__.removeprefix("Stage"))
    if index not in range(len(program.stages)):
        raise PlanError(
            f"{folder}/program.json", f"has no stage {index}", "the folder that this file was written to"
        )
    if stage.layers:
        path = Path(folder) / stage.layers
        # The class in hand has the methods of this file alone: those of layers.py are added here.
        give_layers(stage, load_layers(program.sources[stage.layers], str(path)))
    # One stage, and one replica unless it reads the rows of others: the ranks that its own lines communicate with.
    mesh = program.mesh.along((*program.mesh.value_axes, *program.busy_axes))
    world = ThreadWorld(mesh, Communicators(sub_axes=program.sub_axes), "cpu", timeout)
    ranks = run_ranks(world, lambda rank: _run(stage, program, index, rank))
    head = f"{stage.__name__} on {mesh.size} tensor rank{'s'[: mesh.size > 1]}; shapes are a rank's"
    wrong = list(dict.fromkeys(text for check in ranks for text in check.wrong))
    verdict = "something is wrong: see below" if wrong else "all values and gradients are finite"
    return Check([head, *ranks[0].lines, f"  {verdict}"], wrong)


def _run(stage: type[Stage], program: Program, index: int, world: World) -> Check:
    """Run forward and backward on one rank."""
    spec = program.stages[index]
    # One seed for all ranks: replicated values must be equal.
    generator = torch.Generator().manual_seed(index)
    weights = _random_weights(program, spec, generator)
    inputs = {}
    for batch_input in program.inputs:
        if batch_input.name in spec.inputs:
            # Stages may draw different inputs: they are not compared with each other.
            inputs[batch_input.name] = _random(batch_input.shape, batch_input.dtype, generator)
    arriving = {}
    for crossing in program.crossings:
        if crossing.name in spec.crossings:
            x = _random(crossing.shape, crossing.dtype, generator)
            arriving[crossing.name] = x.requires_grad_(crossing.has_grad)
    buffers = {name: program.buffers[name] for name in spec.buffers}
    groups = {axis: world.group((axis,)) for axis in program.stage_axes}
    this = stage(groups=groups, weights=weights, buffers=buffers, device=torch.device("cpu"))
    this.main_grads = _add
    this.draw_masks(program.seed, step=0, first_row=0, rows=program.rows)
    set_batch_sums(this, [inputs], lambda own, _: own)
    if this.counts:
        # Those of this microbatch alone, where the executor sums over all of them.
        this.totals = tuple(float(count) for count in this.count(**inputs))
    results = this.run(**arriving, **inputs)
    names = list(spec.outputs)
    if index == program.loss_stage:
        names.append("loss")
    if len(results) != len(names):
        raise InternalError(
            stage.__name__, f"returns {len(results)} values where program.json has {len(names)}"
        )
    _differentiate(this, results)
    returned = dict(zip(names, results, strict=True))
    return Check(_lines(inputs, arriving, returned, weights), _faults(arriving, returned, weights))


def _random_weights(program: Program, spec: StageSpec, generator: torch.Generator) -> dict[str, nn.Parameter]:
    """Return parameters of the shapes that one tensor rank uses."""
    weights = {}
    for name in spec.params:
        param = program.param(name)
        value = _random(param.local_shape(program.mesh), param.use.dtype, generator, SCALE)
        weights[name] = nn.Parameter(value, param.requires_grad)
    return weights


def _differentiate(stage: Stage, results: Sequence[torch.Tensor]) -> None:
    """Run backward, with ones as the gradients of all results, and the GEMMs that it deferred."""
    roots = [x for x in results if x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    # A zero-bubble schedule would run these at its W.
    for gemm in stage.deferred.take():
        _add(gemm)


def _random(shape: Sequence[int], name: str, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Return random numbers of the dtype `name`; integers are 0 or 1, which every vocabulary has."""
    dtype = getattr(torch, name)
    if dtype.is_floating_point:
        return (scale * torch.randn(tuple(shape), generator=generator, device="cpu")).to(dtype)
    return torch.randint(0, 2, tuple(shape), generator=generator, device="cpu").to(dtype)


def _add(gemm: WeightTerm) -> None:
    """Run the GEMM of a weight's gradient, which a linear layer left."""
    gemm.weight.grad = gemm.add_to(gemm.weight.grad, gemm.weight.dtype)


def _lines(
    inputs: dict[str, torch.Tensor],
    arriving: dict[str, torch.Tensor],
    results: dict[str, torch.Tensor],
    weights: dict[str, nn.Parameter],
) -> list[str]:
    # In the order in which a stage meets them: what comes in, what it gives, what backward gives.
    lines = [f"  batch      {name}  {_about(x)}" for name, x in inputs.items()]
    lines += [f"  arrives    {name}  {_about(x)}" for name, x in arriving.items()]
    for name, x in results.items():
        value = f" = {x.item():.4f}" if x.dim() == 0 else ""
        lines.append(f"  returns    {name}  {_about(x)}{value}")
    for name, x in arriving.items():
        if x.grad is not None:
            lines.append(f"  goes back  gradient of {name}  {_about(x.grad)}")
    trained = [weight for weight in weights.values() if weight.requires_grad]
    count = sum(weight.grad is not None for weight in trained)
    return [*lines, f"  backward   {count} of {len(trained)} parameters have a gradient"]


def _faults(
    arriving: dict[str, torch.Tensor], results: dict[str, torch.Tensor], weights: dict[str, nn.Parameter]
) -> list[str]:
    """Name the tensors that are NaN, infinite or without a gradient."""
    leaves = {name: x for name, x in (*arriving.items(), *weights.items()) if x.requires_grad}
    missing = []
    tensors = dict(results)
    for name, x in leaves.items():
        if x.grad is None:
            missing.append(name)
        else:
            tensors[f"the gradient of {name}"] = x.grad
    broken = [name for name, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())]
    faults = []
    if broken:
        faults.append(f"NaN or infinite: {_few(broken)}")
    if missing:
        faults.append(f"no gradient: {_few(missing)}")
    return faults


def _few(names: Sequence[str]) -> str:
    """Return `a, b, c, d, e and 3 more`."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _about(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
