"""Composition: a covering array over everything that `Options` lets one combine, each case held against one device.

For any three axes, every triple of their values that goes together is in one of `cases(3)`; for any two, every pair in
`cases(2)`; for any two but the kind of model, every pair in `few_cases()`, which `make test` runs. A case trains on new data in
every step, in float64; it compares the loss, every gradient and every parameter of every step with the model on one device at
1e-9; it may save and load in the middle, to the same mesh or to another; it may evaluate between the steps.

**A new feature adds its axis here**: a line in `AXES` if it is a keyword of `Options` (its name is the axis, and its values
are passed as they are), or a line and a few words in `run` if it is something that a user does. What is not varied is in
`OUTSIDE`, or for single values in `LEFT_OUT`, each with the reason. A test fails when `Options` has a field, or a field a
value, that none of these knows. What does not go together is asked of `Options` and of the schedules, never written here;
an axis on which such an answer depends is in `BOUND`.

    for case in few_cases(): run(case)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd import schedule
from autoptd.errors import PlanError
from autoptd.ir import machine
from autoptd.ir.actions import SCHEDULES
from autoptd.options import KEYWORDS, make_options
from autoptd.runtime.step.microbatches import is_call_of
from autoptd.verify.one_device import masks_of
from tests.parity.kinds import KINDS, LENGTH, Batch, Kind, call

AXES: dict[str, tuple[Any, ...]] = {  # of each the simplest first
    "model": tuple(KINDS),
    "dropout": (0.0, 0.2),
    "reload": (
        "no",
        "same mesh",
        "other mesh",
        "checkpoint",
    ),  # after the second step: a state dict of model and optimizer; a folder, to another mesh
    "evaluate": (False, True),  # after the first and the last step
    "initial": ("given", "deferred"),  # the model has its values, or the ranks make them
    "schedule": ("1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zb_2p", "zbv"),
    "t": (1, 2, 3),
    "p": (1, 2, 3),
    "d": (1, 2),
    "c": (1, 2),
    "v": (1, 2, 3),
    "order": ("tp-cp-dp-pp", "pp-dp-cp-tp", "dp-pp-tp-cp"),
    "num_microbatches": (1, 2, 3, 4),
    "sequence_parallel": (False, True, "auto"),
    "context": ("auto", "all_gather"),
    "token_order": ("auto", "zigzag", "contiguous"),
    "p2p": ("auto", "direct", "scatter_gather"),
    "fuse": ("eager", False),
    "async_tensor_model_parallel_allreduce": (False, True),
    "accumulate_allreduce_grads_in_fp32": (False, True),
    "delay_wgrad_compute": (None, "after_b", "before_reduce"),
    "precision": (
        None,
        "bf16",
        "fp16",
        "bf16-mixed",
    ),  # in float64, as everything here: storage apart from what stages use
    "zero": (0, 1, 2, 3),
    "reshard_after_forward": ("auto", True, False),
    "recompute": (None, "full", "selective", "full:1/2", ("*",), "auto"),
    "shapes": (None, "exact"),  # with it, every second step has another length and more rows
    "slow": (
        "links",
        "products",
    ),  # what plans save first: beside slow products tp divides more, tokens of the loss among it
}
SIMPLEST = {name: values[0] for name, values in AXES.items()}
PRICE = 1e-11
OWN = ("model", "dropout", "reload", "evaluate", "initial", "slow")  # what is no keyword
BOUND = (  # which axes decide together what goes; of two groups, all that goes in each (test_covering.py)
    ("schedule", "p", "v", "num_microbatches", "delay_wgrad_compute"),
    ("t", "sequence_parallel"),
    ("c", "context", "token_order"),
    ("accumulate_allreduce_grads_in_fp32", "precision"),
    ("zero", "reshard_after_forward"),
)

OUTSIDE = {  # fields of Options that are not varied
    "loss_fn": "with the kind of model",
    "seed": "draws other masks, by the same way: runtime/test_dropout.py",
    "device": "tests marked gpu",
    "backend": "real processes: processes/",
    "timeout": "no number depends on it",
    "loss_scale": "divided out again: parity/test_fp16.py",
    "initial_loss_scale": "see loss_scale",
    "loss_scale_window": "see loss_scale",
    "hysteresis": "see loss_scale",
    "min_loss_scale": "see loss_scale",
    "check_every": "how often ranks are compared, no number depends on it: processes/test_disagreement.py",
    "nan": "what is done with a NaN: runtime/test_executor.py",
    "fuse_only": "a part of fuse: parity/test_fusion.py",
    "reduce_dtype": "changes nothing in float64: parity/test_zero.py",
    "dp_shard": "wants 4 replicas: parity/test_zero.py",
    "recompute_num_layers": "with recompute='full': parity/test_recompute.py",
    "max_programs": "how many there may be: test_lengths.py",
    "program_cache": "the same programs, read: test_program_cache.py",
    "memory": "what is chosen, not how it runs: test_fit.py",
    "memory_price": "likewise; with recompute='auto'",
    "machine": "with slow",
    "plan": "pins what is chosen: test_plan.py; with some kinds of model",
}
LEFT_OUT = {
    ("context", "ulysses"): "refuses heads that do not divide: parity/test_context.py",
    ("zero", "auto"): "the choice between 0 and 1: passes/stages/test_memory_price.py",
    ("fuse", "triton"): "needs a CUDA device; the interpreter takes minutes: kernels/test_triton.py",
    ("precision", "fp16-mixed"): "bf16-mixed with the loss scale of fp16: parity/test_mixed.py",
    ("fuse", "inductor"): "torch's compiler takes minutes: runtime/test_inductor.py",
}

ROWS = 2  # of a microbatch
STEPS = 4
TOLERANCE, NOISE, LR = 1e-9, 1e-3, 1e-2
Case = dict[str, Any]
Values = frozenset[tuple[str, Any]]  # of some axes


def declared(name: str) -> set[Any]:
    """The values that `Options` declares for a field; empty where any number will do."""
    return set(SCHEDULES) if name == "schedule" else set(KEYWORDS[name].choices)


def goes_together(case: Case) -> bool:
    """Whether Options and the schedule take these values of the bound axes."""
    asked = {name: value for name, value in case.items() if name not in OWN}
    try:
        options = make_options(**asked)
        schedule.build_orders(str(options.schedule), options.p, options.v, options.num_microbatches or 1)
    except PlanError:
        return False
    return options.t > 1 or options.sequence_parallel is False  # the same program three times otherwise


def combinations(names: Sequence[str]) -> list[Case]:
    """All values of some axes that go together, where those of the others are the simplest."""
    every = itertools.product(*(AXES[name] for name in names))
    return [case for values in every if goes_together(case := dict(zip(names, values, strict=True)))]


class Feasible:
    """Which values of a group of bound axes go together: a bit for each of their combinations that does."""

    def __init__(self, names: Sequence[str]) -> None:
        rows = combinations(names)
        self.every = (1 << len(rows)) - 1
        self.bits: dict[tuple[str, Any], int] = {}
        for name in names:
            for value in AXES[name]:
                self.bits[name, value] = sum(1 << i for i, row in enumerate(rows) if row[name] == value)

    def __call__(self, values: Iterable[tuple[str, Any]]) -> bool:
        """Whether there is a case with these values."""
        left = self.every
        for one in values:
            left &= self.bits.get(one, self.every)
        return left != 0


@cache
def groups() -> tuple[Feasible, ...]:
    return tuple(map(Feasible, BOUND))


def feasible(values: Collection[tuple[str, Any]]) -> bool:
    """Whether there is a case with these values."""
    return all(group(values) for group in groups())


def tuples(strength: int) -> list[Values]:
    """All that is to be covered: values of so many axes that go together."""
    found = []
    for names in itertools.combinations(AXES, strength):
        for values in itertools.product(*(AXES[name] for name in names)):
            pairs = tuple(zip(names, values, strict=True))
            if feasible(pairs):
                found.append(frozenset(pairs))
    return found


@cache
def cases(strength: int) -> tuple[Case, ...]:
    """A covering array, the same each time; the few ones are the first of those of strength 2, and these of strength 3."""
    every = tuples(strength)
    return _covering(every, every, strength, cases(strength - 1) if strength > 2 else few_cases())


@cache
def few_cases() -> tuple[Case, ...]:
    """Cases that cover all pairs of values but those with a kind of model, of which each is in some."""
    every = tuples(2)
    return _covering([one for one in every if not any(name == "model" for name, _ in one)], every, 2, ())


def _covering(
    wanted: list[Values], every: list[Values], strength: int, found: tuple[Case, ...]
) -> tuple[Case, ...]:
    """Return the cases found, and more until all wanted tuples are covered.

    Greedy: a case begins with a tuple that is not covered yet; the other axes follow in their order, each with the value that
    completes most such tuples with those before it (and then most of all tuples; the simplest of the best).
    """
    cases, left, all_left = list(found), dict.fromkeys(wanted), dict.fromkeys(every)
    for case in cases:
        _cross_out(left, case, strength)
        _cross_out(all_left, case, strength)
    while left:
        case = dict(next(iter(left)))
        for name in (one for one in AXES if one not in case):

            def gain(value: Any, name: str = name, case: Case = case) -> tuple[int, int]:
                one = name, value
                return _gain(left, case, one, strength), _gain(all_left, case, one, strength)

            allowed = [value for value in AXES[name] if feasible([*case.items(), (name, value)])]
            case[name] = max(allowed, key=gain)
        case = {name: case[name] for name in AXES}
        _cross_out(left, case, strength)
        _cross_out(all_left, case, strength)
        cases.append(case)
    return tuple(cases)


def _gain(left: dict[Values, None], case: Case, more: tuple[str, Any], strength: int) -> int:
    others = itertools.combinations(case.items(), strength - 1)
    return sum(frozenset((*one, more)) in left for one in others)


def _cross_out(left: dict[Values, None], case: Case, strength: int) -> None:
    for one in itertools.combinations(case.items(), strength):
        left.pop(frozenset(one), None)


def name_of(case: Case) -> str:
    """A short name: what differs from the simplest."""
    mesh = f"t{case['t']}p{case['p']}d{case['d']}c{case['c']}v{case['v']}m{case['num_microbatches']}"
    said = {
        name: value
        for name, value in case.items()
        if name not in ("t", "p", "d", "c", "v", "num_microbatches", "model")
    }
    short = [f"{name}={value}" for name, value in said.items() if value != AXES[name][0]]
    return "-".join([case["model"], mesh, *short])


# a case is run


class Trainer:
    """A mesh's model with its optimizer."""

    def __init__(self, kind: Kind, model: nn.Module, batch: Batch, keywords: Case) -> None:
        if kind.shard and keywords["t"] > 1:
            pins = [{"pattern": pattern, "dim": 0} for pattern in kind.shard]
            keywords = {**keywords, "plan": {"shard": pins}}
        about = {"loss_fn": kind.loss_fn, "backend": "local", "timeout": 60, "example_inputs": batch}
        # Users are told that storage would be float32.
        with mock.patch("autoptd.api.check_precision"):
            self.pm = autoptd.parallelize(model, **keywords, **about)
        self.optimizer = self.pm.optimizer(torch.optim.AdamW, lr=LR, eps=1e-3)

    def moved_to(self, other: Trainer) -> Trainer:
        """`other`, with the state of this one, which is closed."""
        other.pm.load_state_dict(self.pm.state_dict())
        other.pm.load_optimizer_state_dict(other.optimizer, self.pm.optimizer_state_dict(self.optimizer))
        other.pm.steps = self.pm.steps
        self.pm.close()
        return other

    def saved_for(self, other: Trainer) -> Trainer:
        """`other`, with a checkpoint of this one, which is closed."""
        with TemporaryDirectory() as folder:
            self.pm.save(f"{folder}/saved", optimizer=self.optimizer)
            self.pm.close()
            other.pm.load(f"{folder}/saved", optimizer=other.optimizer)
        return other


SLOW_PRODUCTS = machine.Machine(latency=1e-9, per_saved_byte=1e-12, flops=1e9)


def run(case: Case) -> None:
    """Train a case beside the model on one device; AssertionError names the first value that differs."""
    if case["slow"] == "links":
        train(case)
    else:
        with mock.patch.object(machine, "DEFAULT", SLOW_PRODUCTS):
            train(case)


def train(case: Case) -> None:
    kind, keywords = KINDS[case["model"]], {name: value for name, value in case.items() if name not in OWN}
    if case["recompute"] == "auto":
        # Of a byte, in seconds: for nothing all is kept.
        keywords["memory_price"] = PRICE
    rows = ROWS * case["num_microbatches"] * case["d"]
    untouched, reference = models(kind, case)
    if kind.mixes and case["num_microbatches"] > 1:
        with pytest.raises(PlanError, match="num_microbatches=1"):
            Trainer(kind, untouched, kind.batch(rows, 0), keywords)
        keywords = in_one_microbatch(keywords)
    plain = torch.optim.AdamW(reference.parameters(), lr=LR, eps=1e-3)
    ours = Trainer(kind, untouched, kind.batch(rows, 0), keywords)
    try:
        for step in range(STEPS):
            batch = kind.batch(rows, step)
            if case["shapes"] is not None and step % 2:
                batch = resized(kind, case, 2 * rows, step)
            our_loss = ours.pm.step(**batch)
            with masks_of(program_of(ours.pm, batch), ours.pm.steps):
                loss = call(kind, reference, batch)
            loss.backward()
            compare("loss", step, {"": our_loss}, {"": loss})
            gradients = {name: p.grad for name, p in aliases(reference).items() if p.grad is not None}
            compare("gradient", step, ours.pm.gradients(), gradients)
            for optimizer in (plain, ours.optimizer):
                optimizer.step()
                optimizer.zero_grad()
            compare("parameter", step, ours.pm.state_dict(), aliases(reference), floor=LR)
            if case["evaluate"] and step in (0, STEPS - 1):
                compare(
                    "evaluation",
                    step,
                    {"": ours.pm.eval_step(**batch)},
                    {"": evaluated(kind, reference, batch)},
                )
            if case["reload"] != "no" and step == 1:
                other = keywords if case["reload"] == "same mesh" else other_mesh(keywords)
                there = Trainer(kind, untouched, batch, other)
                move = Trainer.saved_for if case["reload"] == "checkpoint" else Trainer.moved_to
                ours = move(ours, there)
    finally:
        ours.pm.close()


def in_one_microbatch(keywords: Case) -> Case:
    """As the remedy says, by another schedule where that has not one microbatch."""
    one = {**keywords, "num_microbatches": 1}
    return one if goes_together({**SIMPLEST, **one}) else {**one, "schedule": "1f1b", "v": 1}


def resized(kind: Kind, case: Case, rows: int, step: int) -> Batch:
    """A batch of another number of rows and of another length, which divides over the ranks that split tokens."""
    parts = [case["t"] * case["c"], 2 * case["c"] if case["token_order"] == "zigzag" else 1]
    lengths = (LENGTH // 2, LENGTH - 4, LENGTH)
    length = next(one for one in lengths if not any(one % count for count in parts))
    return {
        name: x[:, :length] if x.dim() > 1 and x.shape[1] == LENGTH else x
        for name, x in kind.batch(rows, step).items()
    }


def program_of(pm: autoptd.ParallelModel, batch: Batch) -> autoptd.Program:
    """The program that ran a batch; there is one for its sizes."""
    (program,) = (one for one in pm.programs if is_call_of(one, (), batch, one.mesh.replicas))
    return program


def models(kind: Kind, case: Case) -> tuple[nn.Module, nn.Module]:
    """The model that is handed over, and the one on one device."""
    if case["initial"] == "given":
        return kind.make(case["dropout"]), kind.make(case["dropout"])
    with autoptd.deferred():
        model = kind.make(case["dropout"])
    return model, autoptd.materialize(model)


def other_mesh(keywords: Case) -> Case:
    """One on which everything lies in another place: without tensor ranks where there are some, and the other way around; of
    ranks with other tokens likewise.
    """
    mesh = {"t": 2, "p": 1, "d": 2, "v": 1} if keywords["t"] == 1 else {"t": 1, "p": 2, "d": 1, "v": 1}
    mesh |= {"c": 3 - keywords["c"]}
    kept = ("accumulate_allreduce_grads_in_fp32", "shapes")
    return mesh | {name: keywords[name] for name in kept}


def aliases(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under all their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def evaluated(kind: Kind, model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss: Tensor = call(kind, model, batch)
    model.train()
    return loss


def compare(
    what: str, step: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float = 0.0
) -> None:
    """Everything in `theirs`, and no gradient that is not there, at 1e-9 of its largest entry (and of the noise's)."""
    largest = max(float(x.detach().abs().max()) for x in theirs.values())
    floor = max(floor, NOISE * largest if what == "gradient" else 0.0)
    if what == "gradient":
        assert set(ours) == set(theirs), f"{what}s of step {step}: other names, {set(ours) ^ set(theirs)}"
    for name, wanted in theirs.items():
        x, wanted = ours[name].detach(), wanted.detach()
        assert x.dtype == wanted.dtype and x.shape == wanted.shape, f"{what} {name}: {x.dtype} {x.shape}"
        size = float((x - wanted).abs().max()) / max(float(wanted.abs().max()), floor)
        assert size <= TOLERANCE, f"{what} {name} of step {step} differs by {size:.1e}"
