"""Check that all ranks compute the same: every replica runs the same rows, forward and backward, twice.

In: the executor of a rank, and the microbatches of the first replica. Out: nothing, or one RuntimeFault on all ranks
together, which names the ranks whose outputs or gradients differ in any bit; all results are discarded.
Stages are compared between replicas before anything is summed over them. A rank whose two runs differ is
named too: kernels have to be deterministic.

    check_ranks(executor, microbatches)                  # a collective
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autoptd.errors import RuntimeFault
from autoptd.runtime.checks.agreement import (
    RANKS,
    Prints,
    agree_on_largest,
    compare,
    listed,
    merge_over_ranks,
)
from autoptd.runtime.params.fingerprint import fingerprint
from autoptd.runtime.step.executor import Executor

Microbatch = Mapping[str, torch.Tensor]
# The findings of a rank about batches, outputs and gradients, and the items that differ when computed twice.
Findings = tuple[list[list[str]], list[str]]


def check_ranks(
    executor: Executor, microbatches: Sequence[Microbatch], loss_scale: float | None = None
) -> None:
    """Raise RuntimeFault on all ranks unless all replicas compute the same; a collective."""
    world = executor.world
    batch = prints_of_batch(microbatches)
    outputs, gradients = run_once(executor, microbatches, loss_scale)
    again = run_once(executor, microbatches, loss_scale)
    findings: list[list[str]] = [[], [], []]
    for axis in world.mesh.batch_axes:
        for found, prints in zip(findings, (batch, outputs, gradients), strict=True):
            found += compare(world.group((axis,)), prints, RANKS)
    unsteady = [
        name
        for one, two in zip((outputs, gradients), again, strict=True)
        for name, value in one.items()
        if int(value) != int(two[name])
    ]
    is_bad = bool(unsteady) or any(findings)
    if not agree_on_largest(world, torch.tensor(int(is_bad), device=world.device), RANKS):
        return
    of_ranks = merge_over_ranks(world, {world.rank: (findings, unsteady)}, RANKS)
    raise fault_of([of_ranks[number] for number in sorted(of_ranks)])


def fault_of(of_ranks: Sequence[Findings]) -> RuntimeFault:
    """Return the fault for the findings of all ranks, possible causes first."""
    batches, outputs = texts_of(of_ranks, 0), texts_of(of_ranks, 1)
    # Backward begins in the last stage.
    gradients = texts_of(of_ranks[::-1], 2)
    if batches:
        remedy = "pass the same global batch on all ranks, as to pm.local_batch"
        return RuntimeFault(RANKS, listed(batches), remedy)
    unsteady = [f"{names[0]} on rank {number}" for number, (_, names) in enumerate(of_ranks) if names]
    if unsteady:
        fact = f"the same rows give other bits the second time: {listed(unsteady)}"
        remedy = (
            "torch.use_deterministic_algorithms(True), then check again; if that rank alone still differs, "
        )
        remedy += "replace its device"
        return RuntimeFault(RANKS, fact, remedy)
    fact = f"the same rows give other bits: {listed([*outputs, *gradients])}"
    remedy = "take the rank that differs out of the run (where two are named, either may be wrong), and go back to a "
    remedy += "checkpoint; on devices of different models bits may differ without a defect"
    return RuntimeFault(RANKS, fact, remedy)


def texts_of(of_ranks: Sequence[Findings], kind: int) -> list[str]:
    """Return the findings of a kind; all ranks of a group have the same ones."""
    return list(dict.fromkeys(text for findings, _ in of_ranks for text in findings[kind]))


def prints_of_batch(microbatches: Sequence[Microbatch]) -> Prints:
    """Return the fingerprint of each input that this rank's stages read."""
    prints: Prints = {}
    for number, microbatch in enumerate(microbatches):
        for name, x in microbatch.items():
            _add(prints, f"input {name}", fingerprint(x, str(number)))
    return prints


def run_once(
    executor: Executor, microbatches: Sequence[Microbatch], loss_scale: float | None
) -> tuple[Prints, Prints]:
    """Run a step whose gradients are dropped; return the fingerprints of stages' outputs, and of their gradients."""
    outputs: Prints = {}
    gradients: Prints = {}

    def note(name: str, x: torch.Tensor) -> None:
        _add(gradients, f"the gradient of {name}", fingerprint(x, name))

    def note_results(stage: int, results: Sequence[Any]) -> None:
        for number, x in enumerate(results):
            if isinstance(x, torch.Tensor):
                _add(outputs, f"the output of stage {stage}", fingerprint(x, str(number)))

    for bucket in executor.gradients.all_buckets:
        bucket.note = note
    try:
        with as_first_replica(executor), shown_results(executor, note_results):
            try_step(executor, microbatches, loss_scale)
    finally:
        for bucket in executor.gradients.all_buckets:
            bucket.note = None
    return outputs, gradients


def try_step(executor: Executor, microbatches: Sequence[Microbatch], loss_scale: float | None) -> None:
    """Run a step like `Executor.step`, and drop its gradients; the step count and the user's tensors are
    kept.
    """
    try:
        with executor.guard(), torch.enable_grad():
            executor.sum_gradients(microbatches, loss_scale, RANKS)
            executor.world.raise_first_fault()
    finally:
        executor.gradients.drop()


def _add(prints: Prints, name: str, value: torch.Tensor) -> None:
    prints[name] = prints[name] + value if name in prints else value


@contextmanager
def as_first_replica(executor: Executor) -> Iterator[None]:
    """Let dropout draw the masks of the first replica's rows."""
    own, executor.replica = executor.replica, 0
    try:
        yield
    finally:
        executor.replica = own


@contextmanager
def shown_results(executor: Executor, note: Callable[[int, Sequence[Any]], None]) -> Iterator[None]:
    """Pass the results of each forward of a stage to `note`."""

    def shown(index: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_show(**inputs: Any) -> Any:
            results = list(run(**inputs))
            note(index, [x.detach() if isinstance(x, torch.Tensor) else x for x in results])
            return results

        return run_and_show

    before = {index: stage.run for index, stage in executor.stages.items()}
    for index, stage in executor.stages.items():
        stage.run = shown(index, before[index])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for index, stage in executor.stages.items():
            stage.run = before[index]  # type: ignore[method-assign]
