"""The programs of a run whose batches have several sizes: one for each, compiled when it first comes.

In: the calls of `step` and `eval_step`, and a way to compile. Out: the program for a call, which the ranks use from then on.
All share the ranks' parameters, and so the optimizer; all ranks take part in each call.

    programs = Programs(most=16, are_processes=False)
    programs.begin(first, ranks)
    program = programs.find("step", ranks, args, kwargs, compile)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoptd.errors import AutoptdError, PlanError, TraceError
from autoptd.program.program import Program
from autoptd.runtime import check_sizes
from autoptd.runtime.batch import check_structure, expected_shape
from autoptd.runtime.check_call import check_kinds
from autoptd.runtime.check_sizes import Sizes, agree_on_sizes
from autoptd.runtime.checkpoint.restore import agree, attempted
from autoptd.runtime.launch import COMPILING, RunningRanks

EVALUATION = "eval_step"
Compile = Callable[[], Program]


class Programs:
    """Programs by what they are for; at most so many that train, and as many that evaluate.

    `are_processes`: the ranks may be called with different batches. Threads have one for all of them.
    """

    def __init__(self, most: int, *, are_processes: bool) -> None:
        self.most, self._are_processes = most, are_processes
        self._by_sizes: dict[Sizes, Program] = {}

    def begin(self, first: Program, ranks: RunningRanks) -> None:
        """Take in the program that the ranks were started with."""
        shapes = [(spec.name, expected_shape(first, spec, ranks.replicas)) for spec in first.inputs]
        sizes = Sizes("step", tuple(shapes), _texts(first, dict(first.constants)))
        self._first, self._by_sizes[sizes] = first, first
        for rank in ranks.here:
            rank.others[sizes] = rank.executor

    @property
    def trained(self) -> list[Program]:
        """Those that train, in the order in which their sizes came."""
        return [program for sizes, program in self._by_sizes.items() if sizes.call != EVALUATION]

    def find(
        self, call: str, ranks: RunningRanks, args: tuple[Any, ...], kwargs: dict[str, Any], compile: Compile
    ) -> Program:
        """Return the program for the sizes of a call, which the ranks use from now on. A collective.

        PlanError on all ranks where they have other sizes, where there is no such program, or where it is one too many.
        """
        sizes = self._agreed(call, ranks, args, kwargs)
        program = self._by_sizes.get(sizes)
        if program is None:
            self._check_count(sizes)
            program = self._compiled(sizes, ranks, compile)
            self._attach(sizes, program, ranks)
        ranks.use(sizes, evaluates=call == EVALUATION)
        return program

    def trained_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Return the program that trains with the sizes of an evaluation, if there is one, else the first."""
        return self._by_sizes.get(sizes_of(self._first, "step", args, kwargs), self._first)

    def forget(self, brought: Mapping[str, torch.Tensor], first: Program, ranks: RunningRanks) -> None:
        """Forget the programs that were compiled for other values of buffers: they are compiled again when they are needed.

        The first one, which may have read others, is `first` from now on.
        """
        for sizes, program in list(self._by_sizes.items()):
            if program is self._first:
                self._by_sizes[sizes] = first
            elif program.differing(brought):
                del self._by_sizes[sizes]
                for rank in ranks.here:
                    del rank.others[sizes]
        self._first = first

    def _agreed(self, call: str, ranks: RunningRanks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes:
        """Return the sizes of a call, which all ranks have."""
        sizes: Sizes | None = None
        fault: AutoptdError | None = None
        try:
            sizes = sizes_of(self._first, call, args, kwargs)
        except AutoptdError as error:
            fault = error
        if self._are_processes:
            ranks.unrecorded.run(check_sizes.SITE, lambda rank: agree_on_sizes(rank.world, sizes, fault))
        if fault is not None:
            raise fault
        assert sizes is not None
        return sizes

    def _check_count(self, sizes: Sizes) -> None:
        """Raise PlanError where another program would be one too many."""
        known = [other for other in self._by_sizes if other.call == sizes.call]
        if len(known) < self.most:
            return
        shown = "; ".join(map(str, known[:4])) + "; ..." * (len(known) > 4)
        fact = f"{sizes} would be program {len(known) + 1}, and there are {len(known)} already ({shown})"
        remedy = (
            f"batches of fewer different sizes (pad lengths to multiples), or max_programs={2 * self.most}"
        )
        raise PlanError(f"pm.{sizes.call}", fact, remedy)

    def _compiled(self, sizes: Sizes, ranks: RunningRanks, compile: Compile) -> Program:
        """Compile on all ranks; where one of them cannot, all raise why."""

        def explained() -> Program:
            try:
                return compile()
            except (PlanError, TraceError) as error:
                site = f"pm.{sizes.call} with {sizes}"
                raise PlanError(site, f"{error.site}: {error.fact}", error.remedy) from error

        attempt = attempted(explained)
        if not self._are_processes:
            return attempt()  # type: ignore[no-any-return]
        return ranks.unrecorded.run(COMPILING, lambda rank: agree(rank.world, COMPILING, attempt))

    def _attach(self, sizes: Sizes, program: Program, ranks: RunningRanks) -> None:
        """Let the ranks know a program; an evaluation may be that which trains with these sizes."""
        known = next((other for other, its in self._by_sizes.items() if its is program), None)
        if known is None:
            ranks.attach(sizes, program)
        else:
            for rank in ranks.here:
                rank.others[sizes] = rank.others[known]
        self._by_sizes[sizes] = program


def sizes_of(first: Program, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes:
    """Return the sizes of a call; PlanError where it differs from the compiled one in more than these."""
    leaves = check_structure(first, args, kwargs)
    check_kinds(first, leaves)
    shapes = tuple((spec.name, tuple(leaves[spec.leaf].shape)) for spec in first.inputs)
    return Sizes(call, shapes, _texts(first, leaves))


def _texts(first: Program, leaves: Mapping[int, Any] | Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """Return the arguments that are no tensors, as text; of what may say its address, the type."""
    found = []
    for number, _ in first.constants:
        value = leaves[number]
        is_plain = value is None or isinstance(value, (bool, int, float, complex, str))
        found.append((number, repr(value) if is_plain else type(value).__name__))
    return tuple(found)


__all__ = ["Programs", "sizes_of"]
