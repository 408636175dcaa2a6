"""The judge: torch's own loop on the whole batch beside AutoPTD, with what scripts do between steps.

In: the source of a case (`make(variant)`, `batch(step, rows)`) and a `Script`. Out: an `Outcome` of tests/hostile/oracle.py;
here float32 is held to 1e-4, as both sides round, and everything else to 1e-9. Where the plain loop's own rounding moves
numbers as far (a slope's gradient that nearly cancels), a float32 case has to be equal in float64. Nothing of
`autoptd.verify` is used.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, InternalError, PlanError, TraceError
from tests.hostile.oracle import Different, Outcome, namespace, relative

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
NOISE = 1e-3
ROUNDING = {"float64": 1e-4, "float32": 1e-2}  # a larger difference is never one of rounding
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Script:
    """What a training script does; `mesh` are keywords of parallelize."""

    mesh: dict[str, Any]
    steps: int = 3
    dtype: str = "float64"
    accumulate: int = 1  # calls of step for one of the optimizer
    clip: float = 0.0
    groups: bool = False  # no weight decay for vectors, another rate for the rest
    schedule: bool = False  # of the learning rate
    zeros: bool = False  # zero_grad(set_to_none=False)
    halve: bool = False  # gradients in place, on all ranks
    evaluate: int = 0  # so many times PIECES rows, after the first and the last step
    load: str = ""  # after the first step: "all" (another state), "some" (strict=False), "buffers"
    reload: dict[str, Any] = field(default_factory=dict)  # after the second step: the mesh to go on with
    lazy: bool = False  # no example_inputs
    loss_fn: bool = False  # the model returns (logits, y); the loss is outside
    train_eval: bool = False  # the user's model was in eval mode when it was given


@dataclass
class Seen:
    """The numbers of one run, by name, in the order in which they were made."""

    numbers: list[tuple[str, Tensor, float]] = field(default_factory=list)  # what, value, floor of its size

    def add(self, what: str, value: Tensor, floor: float = 1e-12) -> None:
        self.numbers.append((what, value.detach().clone(), floor))

    def add_all(self, what: str, values: Tensors, floor: float) -> None:
        for name in sorted(values):
            self.add(f"{what} {name}", values[name], floor)


def judge(source: str, script: Script, *, backend: str | None = "local") -> Outcome:
    """Run a case both ways."""
    start = time.monotonic()

    def outcome(kind: str, detail: str = "") -> Outcome:
        return Outcome(kind, detail, time.monotonic() - start)

    try:
        wanted = plain_loop(source, script)
    except Exception as error:
        return outcome("void", f"{type(error).__name__}: {error}")
    if not all(value.isfinite().all() for _, value, _ in wanted.numbers):
        return outcome("void", "not finite")
    phase = ["make"]
    try:
        found = autoptd_loop(source, script, phase, backend)
        if found is not None:
            compare(found, wanted, TOLERANCES[getattr(torch, script.dtype)])
    except Different as error:
        if is_rounding(source, script, wanted, error.size) and is_exact(source, script, backend):
            return outcome("void", f"the plain loop amplifies its own rounding: {error}")
        return outcome("wrong", str(error))
    except (TraceError, PlanError) as error:
        late = phase[0] == "step" and not script.lazy
        return outcome("raw" if late else "refused", f"in {phase[0]}: {type(error).__name__}: {error}")
    except AutoptdError as error:
        kind = "InternalError" if isinstance(error, InternalError) else type(error).__name__
        return outcome("raw", f"in {phase[0]}: {kind}: {error}")
    except Exception as error:
        return outcome("raw", f"in {phase[0]}: {type(error).__name__}: {error}")
    return outcome("equal")


def made(source: str, script: Script, variant: int = 0) -> tuple[dict[str, Any], nn.Module]:
    """The source run from the beginning, and a model of the script's dtype."""
    case = namespace(source)
    torch.set_default_dtype(getattr(torch, script.dtype))
    case["DTYPE"] = getattr(torch, script.dtype)
    return case, case["make"](variant)


def plain_loop(source: str, script: Script, shaken: float = 0.0) -> Seen:
    """What a script without AutoPTD does; with weights that are off by `shaken` of themselves."""
    case, model = made(source, script)
    model = copy.deepcopy(model)
    if shaken:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.mul_((1 + shaken * noise).to(parameter.dtype))
    named = dict(model.named_parameters())
    optimizer = make_optimizer(
        script, named, lambda cls, groups, **kw: cls(groups, **kw), list(named.values())
    )
    rates = make_schedule(script, optimizer)
    seen = Seen()

    def loss_of(args: Any, kwargs: Any) -> Tensor:
        if not script.loss_fn:
            return find_loss(model(*args, **kwargs))
        targets = kwargs.pop("targets")
        return case["loss_fn"](model(*args, **kwargs), targets)

    for step in range(script.steps):
        for part in range(script.accumulate):
            loss = loss_of(*case["batch"](step * 7 + part, case["B"]))
            loss.backward()
            seen.add(f"loss {step}.{part}", loss)
        if script.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), script.clip)
            seen.add(f"norm {step}", norm)
        every = dict(model.named_parameters(remove_duplicate=False))
        if script.halve:
            for one in named.values():
                if one.grad is not None:
                    one.grad.mul_(0.5)
        keep_gradients(seen, step, {name: one.grad for name, one in every.items() if one.grad is not None})
        optimizer.step()
        if rates is not None:
            rates.step()
        optimizer.zero_grad(set_to_none=not script.zeros)
        seen.add_all(f"state {step}", dict(model.state_dict()), 1e-2)
        if script.evaluate and step in (0, script.steps - 1):
            model.eval()
            with torch.no_grad():
                args, kwargs = case["batch"](100 + step, script.evaluate * case["PIECES"])
                seen.add(f"evaluation {step}", loss_of(args, kwargs))
            model.train()
        if script.load and step == 0:
            model.load_state_dict(another(model.state_dict(), script.load, set(every)), strict=False)
    return seen


def autoptd_loop(source: str, script: Script, phase: list[str], backend: str | None) -> Seen | None:
    """The same script by AutoPTD."""
    case, model = made(source, script)
    seen = Seen()
    loss_fn = {"loss_fn": case["loss_fn"]} if script.loss_fn else {}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    firsts = dict(model.named_parameters())

    def build(mesh: dict[str, Any]) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
        phase[0] = "parallelize"
        args, kwargs = case["batch"](0, case["B"])
        is_lazy = script.lazy or bool(args and kwargs)  # example_inputs takes one of both
        example = {} if is_lazy else {"example_inputs": args or kwargs}
        pm = autoptd.parallelize(model, **mesh, **loss_fn, backend=backend, timeout=60, **example)
        if is_lazy:
            pm.compile_now(args, kwargs)
        phase.append(pm)  # type: ignore[arg-type]
        return pm, make_optimizer(
            script, firsts, lambda cls, groups, **kw: pm.optimizer(cls, groups, **kw), None
        )

    pm, optimizer = build(script.mesh)
    rates = make_schedule(script, optimizer)

    def local(args: Any, kwargs: Any) -> tuple[Any, Any]:
        found = pm.local_batch(*args, **kwargs)
        return found if args and kwargs else (found, {}) if args else ((), found)

    try:
        for step in range(script.steps):
            for part in range(script.accumulate):
                args, kwargs = local(*case["batch"](step * 7 + part, case["B"]))
                phase[0] = "step"
                seen.add(f"loss {step}.{part}", pm.step(*args, **kwargs))
            phase[0] = "between steps"
            if script.clip:
                seen.add(f"norm {step}", pm.clip_grad_norm_(script.clip).to(getattr(torch, script.dtype)))
            if script.halve:
                for parameter in every_parameter(pm, backend):
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            keep_gradients(seen, step, pm.gradients())
            optimizer.step()
            if rates is not None:
                rates.step()
            optimizer.zero_grad(set_to_none=not script.zeros)
            state = pm.state_dict()
            seen.add_all(f"state {step}", state, 1e-2)
            if script.evaluate and step in (0, script.steps - 1):
                phase[0] = "evaluation"
                args, kwargs = local(*case["batch"](100 + step, script.evaluate * case["PIECES"]))
                seen.add(f"evaluation {step}", pm.eval_step(*args, **kwargs))
            if script.load and step == 0:
                phase[0] = "load"
                pm.load_state_dict(another(state, script.load, names), strict=False)
            if script.reload and step == 1:
                phase[0] = "reload"
                moments = optimizer.state_dict()
                pm.close()
                pm, optimizer = build(script.reload)
                pm.load_state_dict(state)
                if rates is not None:  # before the moments: a new schedule sets its first rate
                    rates = make_schedule(script, optimizer, rates.state_dict())
                optimizer.load_state_dict(moments)
        return seen if state else None
    finally:
        pm.close()


def every_parameter(pm: autoptd.ParallelModel, backend: str | None) -> list[nn.Parameter]:
    ranks = range(pm.options.mesh.size) if backend else ()
    found = (
        [one for rank in ranks for one in pm.rank_parameters(rank).values()]
        if backend
        else list(pm.parameters())
    )
    return list({id(one): one for one in found}.values())


def another(state: Tensors, what: str, parameters: set[str]) -> Tensors:
    """Other values for a state: all of them, every second name, or buffers alone."""
    names = sorted(state)
    if what == "some":
        names = [name for name in names if len(name) % 2]
    if what == "buffers":
        names = [name for name in names if name not in parameters]
    return {
        name: state[name] * 1.125 if state[name].is_floating_point() else state[name].clone()
        for name in names
    }


def make_optimizer(
    script: Script, named: dict[str, nn.Parameter], make: Callable[..., Any], tensors: Any
) -> Any:
    """AdamW; in groups by name for AutoPTD, by tensor for torch."""
    keywords: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    if not script.groups:
        return make(torch.optim.AdamW, tensors, **keywords)
    trained = {name: one for name, one in named.items() if one.requires_grad}
    small = [name for name, one in trained.items() if one.dim() < 2]
    large = [name for name in trained if name not in small]
    groups: list[Any] = [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 3e-2}]
    groups = [one for one in groups if one["params"]]
    if tensors is not None:
        groups = [{**one, "params": [trained[name] for name in one["params"]]} for one in groups]
    return make(torch.optim.AdamW, groups, **keywords)


def make_schedule(script: Script, optimizer: Any, state: Any = None) -> Any:
    if not script.schedule:
        return None
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if state is not None:
        rates.load_state_dict(state)
    return rates


def find_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[1]


def keep_gradients(seen: Seen, step: int, gradients: Tensors) -> None:
    largest = max((float(one.abs().max()) for one in gradients.values()), default=1.0)
    seen.add_all(f"gradient {step}", gradients, NOISE * largest)


def compare(found: Seen, wanted: Seen, tolerance: float) -> None:
    """Raise Different at the first number that is another one."""
    ours, theirs = ([what for what, _, _ in one.numbers] for one in (found, wanted))
    if ours != theirs:
        raise Different(f"there or not are {sorted(set(ours) ^ set(theirs))[:6]}")
    for (what, x, _), (_, expected, floor) in zip(found.numbers, wanted.numbers, strict=True):
        if x.dtype != expected.dtype or x.shape != expected.shape:
            raise Different(
                f"{what} is {x.dtype} {list(x.shape)} for {expected.dtype} {list(expected.shape)}"
            )
        size = gap(x, expected, floor)
        if size > tolerance:
            raise Different(f"{what} differs by {size:.1e}", size)


def gap(x: Tensor, expected: Tensor, floor: float) -> float:
    if expected.is_complex():
        x, expected = torch.view_as_real(x), torch.view_as_real(expected)
    return relative(x, expected, floor)


def is_rounding(source: str, script: Script, wanted: Seen, size: float) -> bool:
    """Whether a few last bits of the weights move the plain loop's own numbers nearly as far."""
    if size > ROUNDING[script.dtype]:
        return False
    return moves_as_far(
        plain_loop(source, script, 1e-15 if script.dtype == "float64" else 1e-7), wanted, size
    )


def moves_as_far(shaken: Seen, wanted: Seen, size: float) -> bool:
    """Whether numbers of a loop whose weights were shaken are nearly as far from its own as `size`."""
    pairs = zip(shaken.numbers, wanted.numbers, strict=True)
    return 30 * max(gap(x, expected, floor) for (_, x, _), (_, expected, floor) in pairs) > size


def is_exact(source: str, script: Script, backend: str | None) -> bool:
    """Whether the numbers of a float32 case are equal in float64; there is nothing finer to ask for one in float64."""
    return (
        script.dtype == "float64"
        or judge(source, replace(script, dtype="float64"), backend=backend).kind == "equal"
    )
