"""Run one saved stage alone: `python out/stage_0.py --check`.

In: the class of an emitted file, and the folder that `program.save` wrote it to. Out: what goes in and comes out, printed. Its
t tensor ranks run as threads, with parameters, values of other stages and floating-point inputs drawn at random, and integer
inputs of 0 and 1; then the sum of the outputs goes backward. Without `--check` the file says what it is.

    check_stage(Stage0, "out").lines    # what is printed
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from autoptd.errors import AutoptdError, InternalError, PlanError
from autoptd.ir.mesh import Mesh
from autoptd.program.program import Program
from autoptd.runtime.executor import groups_of
from autoptd.runtime.linear import WeightTerm
from autoptd.runtime.stage import Stage, give_layers, load_layers
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World

SCALE = 0.02  # of random parameters, so that the values of many layers stay finite


def main(stage: type[Stage], file: str, arguments: Sequence[str] | None = None) -> None:
    """What an emitted file does when it is run; ends the process with 0 (well), 1 (failed) or 2 (a wrong flag)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given != ["--check"]:
        print(sys.modules[stage.__module__].__doc__ or stage.__name__)
        print(f"python {file} --check runs this stage alone, on random numbers.")
        sys.exit(2 if given else 0)
    try:
        found = check_stage(stage, Path(file).parent)
    except AutoptdError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print("\n".join(found.lines))
    if found.wrong:
        sys.exit(f"{stage.__name__}: {'; '.join(found.wrong)}")


class Check(NamedTuple):
    """What a stage did: lines to print, and what is wrong with it on any rank (nothing, if all is well)."""

    lines: list[str]
    wrong: list[str]


def check_stage(stage: type[Stage], folder: str | Path, timeout: float = 60.0) -> Check:
    """Run a stage forward and backward; values and gradients have to be there, and finite.

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
        give_layers(stage, load_layers(program.sources[stage.layers], str(path)))
    t = program.mesh.t
    world = ThreadWorld(Mesh(t=t), Communicators(sub_axes=program.sub_axes), "cpu", timeout)
    ranks = run_ranks(world, lambda rank: _run(stage, program, index, rank))
    head = f"{stage.__name__} on {t} tensor rank{'s'[: t > 1]}; shapes are a rank's"
    wrong = list(dict.fromkeys(text for one in ranks for text in one.wrong))
    verdict = "something is wrong: see below" if wrong else "all values and gradients are finite"
    return Check([head, *ranks[0].lines, f"  {verdict}"], wrong)


def _run(stage: type[Stage], program: Program, index: int, world: World) -> Check:
    """One rank's forward and backward."""
    spec, made = program.stages[index], torch.Generator().manual_seed(index)
    weights = {
        name: nn.Parameter(
            _random(one.used_shape(program.mesh), one.use.dtype, made, SCALE), one.requires_grad
        )
        for name in spec.params
        for one in [program.param(name)]
    }
    buffers = {name: program.buffers[name] for name in spec.buffers}
    this = stage(
        groups=groups_of(program, world), weights=weights, buffers=buffers, device=torch.device("cpu")
    )
    this.main_grads = _add
    inputs = {
        one.name: _random(one.shape, one.dtype, made) for one in program.inputs if one.name in spec.inputs
    }
    arriving = {
        one.name: _random(one.shape, one.dtype, made).requires_grad_(one.has_grad)
        for one in program.crossings
        if one.name in spec.crossings
    }
    if this.counts:
        this.totals = tuple(float(one) for one in this.count(**inputs))
    results = this.forward(
        **{name: arriving.get(name, inputs.get(name)) for name in (*spec.crossings, *spec.inputs)}
    )  # type: ignore[arg-type]
    names = [*spec.outputs, *(["loss"] if index == program.loss_stage else [])]
    if len(results) != len(names):
        raise InternalError(
            stage.__name__, f"returns {len(results)} values where program.json has {len(names)}"
        )
    roots = [one for one in results if one.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
    for gemm in this.deferred.take():
        _add(gemm)
    returned = dict(zip(names, results, strict=True))
    return Check(_told(inputs, arriving, returned, weights), _wrong(arriving, returned, weights))


def _random(shape: Sequence[int], dtype: str, made: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    found = getattr(torch, dtype)
    if found.is_floating_point:
        return (scale * torch.randn(*shape, generator=made)).to(found)
    return torch.randint(0, 2, tuple(shape), generator=made).to(found)


def _add(gemm: WeightTerm) -> None:
    """What a linear layer leaves to do for the gradient of its weight."""
    gemm.weight.grad = gemm.add_to(gemm.weight.grad, gemm.weight.dtype)


def _told(
    inputs: dict[str, torch.Tensor],
    arriving: dict[str, torch.Tensor],
    results: dict[str, torch.Tensor],
    weights: dict[str, nn.Parameter],
) -> list[str]:
    lines = [f"  batch      {name}  {_about(x)}" for name, x in inputs.items()]
    lines += [f"  arrives    {name}  {_about(x)}" for name, x in arriving.items()]
    for name, x in results.items():
        value = f" = {x.item():.4f}" if x.dim() == 0 else ""
        lines.append(f"  returns    {name}  {_about(x)}{value}")
    for name, x in arriving.items():
        lines += [f"  goes back  gradient of {name}  {_about(x.grad)}"] if x.grad is not None else []
    trained = [one for one in weights.values() if one.requires_grad]
    found = sum(one.grad is not None for one in trained)
    return [*lines, f"  backward   {found} of {len(trained)} parameters have a gradient"]


def _wrong(
    arriving: dict[str, torch.Tensor], results: dict[str, torch.Tensor], weights: dict[str, nn.Parameter]
) -> list[str]:
    """What is NaN, infinite or without a gradient, by name."""
    leaves = {name: x for name, x in (*arriving.items(), *weights.items()) if x.requires_grad}
    missing = [name for name, x in leaves.items() if x.grad is None]
    tensors = results | {
        f"the gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None
    }
    broken = [name for name, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())]
    found = [f"NaN or infinite: {_few(broken)}"] if broken else []
    return found + ([f"no gradient: {_few(missing)}"] if missing else [])


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _about(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


__all__ = ["Check", "check_stage", "main"]
