"""Run one pipeline rank's actions: a step (all microbatches forward and backward, gradients summed) or an evaluation.

In: a program, this rank's world and parameters, and the microbatches of its replica, a dict of batch inputs each. Out: the
global loss, equal on every rank, and `parameter.grad`.

A *message* is what one stage makes for another, of one microbatch: the values of crossings, or their gradients on the way back
(`messages.py`). An F keeps what its B needs: the arrived tensors, whose `.grad` is sent back, and the *gradient edges* of its
outputs. The outputs themselves are let go, once sent, unless autograd saved them.

    executor = Executor(program, world, params)
    loss = executor.step([{"ids": x, "targets": y} for x, y in microbatches])
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autoptd.errors import InternalError, RuntimeFault
from autoptd.ir.actions import Action, Kind
from autoptd.kernels.forms import wide
from autoptd.program.program import Program
from autoptd.program.specs import CrossingSpec
from autoptd.runtime.dropout import Drawing
from autoptd.runtime.fused import Fused
from autoptd.runtime.gradients import Gradients
from autoptd.runtime.linear import WeightTerm
from autoptd.runtime.messages import Messages
from autoptd.runtime.nan import NanWatch
from autoptd.runtime.parameters import RankParameters, from_rank_0, owners
from autoptd.runtime.stage import LAYERS, Methods, Stage, load_layers, load_stage
from autoptd.runtime.timeline import Watch
from autoptd.runtime.world.world import Communicators, Group, World

Microbatch = Mapping[str, torch.Tensor]
FORWARD = (Kind.F, Kind.SEND_F, Kind.RECV_F)


def communicators_of(program: Program) -> Communicators:
    """Return the communicators that running `program` takes."""
    shared = {owners(program, spec) for spec in program.params}
    links = set()
    for one in program.crossings:
        source = program.rank_of_stage(one.source)
        for target in map(program.rank_of_stage, one.targets):
            links |= {(source, target), (target, source)} if one.has_grad else {(source, target)}
    return Communicators(
        owners=tuple(sorted(ranks for ranks in shared if len(ranks) > 1)),
        links=tuple(sorted((source, target) for source, target in links if source != target)),
        sub_axes=program.sub_axes,
    )


def groups_of(program: Program, world: World) -> dict[str, Group]:
    """Return what a stage may communicate over, by axis."""
    return {axis: world.group((axis,)) for axis in (*world.mesh.value_axes, *program.sub_axes)}


class Wires:
    """Which crossings go between which stages: `values[source, target]` forward, `gradients[source, target]` come back.

    The other tables list, per stage, the stages at the other ends, ascending.
    """

    def __init__(self, program: Program) -> None:
        spec_of = {one.name: one for one in program.crossings}
        self.outputs = {stage.index: [spec_of[name] for name in stage.outputs] for stage in program.stages}
        self.values: dict[tuple[int, int], list[CrossingSpec]] = {}
        for source, outputs in self.outputs.items():
            for one in outputs:
                for target in one.targets:
                    self.values.setdefault((source, target), []).append(one)
        carry = {pair: [one for one in specs if one.has_grad] for pair, specs in self.values.items()}
        self.gradients = {pair: specs for pair, specs in carry.items() if specs}
        stages = range(len(program.stages))
        self.sources = {stage: sorted(a for a, b in self.values if b == stage) for stage in stages}
        self.targets = {stage: sorted(b for a, b in self.values if a == stage) for stage in stages}
        self.grad_sources = {stage: sorted(a for a, b in self.gradients if b == stage) for stage in stages}
        self.grad_targets = {stage: sorted(b for a, b in self.gradients if a == stage) for stage in stages}


@dataclass
class Kept:
    """What the backward of one (stage, microbatch) needs: arrived tensors, and edges of outputs, by crossing."""

    inputs: dict[str, torch.Tensor]
    edges: dict[str, GradientEdge]
    loss: torch.Tensor | None


class Executor:
    """Runs the stages of one rank. Creating it is a collective: buffers are rank 0's.

    After an exception it can be used again if all ranks stopped.
    """

    def __init__(self, program: Program, world: World, params: RankParameters) -> None:
        self.program, self.world, self.params = program, world, params
        self._fingerprint = program.fingerprint()
        self.steps = 0
        self.watch: Watch | None = None  # told when each action starts and ends, where somebody wants to know
        self._order = [(action, str(action)) for action in program.orders[world.pipeline_rank]]
        self._rows = program.rows
        self._wires, self._messages = Wires(program), Messages(program, world)
        # Copies: never the user's own storage.
        self.buffers = {
            name: from_rank_0(world, name, x).clone() for name, x in sorted(program.buffers.items())
        }
        self._stages = {
            spec.index: self._load(spec.index)
            for spec in program.stages
            if program.rank_of_stage(spec.index) == world.pipeline_rank
        }
        # Of the loss, on its stage's ranks; all ranks agree at the first step.
        self._seen_dtype: torch.dtype | None = None
        self._loss_dtype: torch.dtype | None = None
        self._nan = NanWatch(world.device)
        # Whether to keep the host from waiting for the device, which is then behind.
        self._runs_ahead = world.device.type == "cuda"
        self._do = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._weight_gradients,
            Kind.SEND_F: self._messages.send,
            Kind.SEND_B: self._messages.send,
            Kind.RECV_F: self._messages.receive,
            Kind.RECV_B: self._messages.receive,
            Kind.REDUCE: lambda action: self.gradients.reduce(action.stage),
        }
        self._begin(())

    @cached_property
    def gradients(self) -> Gradients:
        """Made at the first step: an executor that only evaluates has none."""
        gradients = Gradients(self.program, self.world, self.params)
        for stage in self._stages.values():
            stage.main_grads = gradients.add
        return gradients

    @property
    def inputs(self) -> set[str]:
        """Names of the batch inputs that this rank's stages read."""
        return {name for spec in self.program.stages if spec.index in self._stages for name in spec.inputs}

    def files(self) -> dict[str, Program]:
        """The program of this rank's stages, by the names that their files have in tracebacks."""
        return {self._title(name): self.program for name in self.program.sources}

    def step(self, microbatches: Sequence[Microbatch], nan: str = "raise") -> torch.Tensor:
        """Run one step; return the detached loss of the global batch, the same on every rank.

        `microbatches` are this replica's, with at least this rank's `inputs`. A NaN loss raises on all ranks and adds no
        gradient (`nan="ignore"` lets it pass); on CUDA it raises in the step after.
        """
        self.steps += 1
        began = time.perf_counter()
        with self._guard(), torch.enable_grad():
            self.gradients.begin()
            self._run(microbatches, self._order)
            self.world.at = "gradients"
            self.gradients.finish()
            loss = self._global_loss()
            bad = self._nan.look(self.steps, loss, self._loss) if nan == "raise" else None
            self.world.raise_first_fault()  # last of all that waits for the device
            bad_ranks = self._ranks_with_nan(bad.own) if bad else []
        # Every rank has come here, and takes the same way on: nobody is left waiting.
        if bad:
            self.gradients.drop()
            raise _nan_fault(self.steps, bad.step, bad_ranks)
        self.gradients.commit()
        self.world.at = "between steps"
        if self.steps == 1 and self.world.rank == 0 and self.program.fuse == "inductor":
            told = f"autoptd: the first step, with compiling its layers, took {time.perf_counter() - began:.1f} s"
            print(told, file=sys.stderr)
        return loss

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the loss of the global batch, without gradients."""
        with self._guard():
            self._run(microbatches, [one for one in self._order if one[0].kind in FORWARD])
            loss = self._global_loss()
            self.world.raise_first_fault()
        self.world.at = "between steps"
        return loss

    def _title(self, name: str) -> str:
        """What tracebacks call an emitted file."""
        return f"<{name} of program {self._fingerprint}>"

    @cached_property
    def _layers(self) -> Methods:
        """The methods that stages share: loaded once, so that those of this rank share what the compiler makes of them."""
        is_compiled, source = self.program.fuse == "inductor", self.program.sources.get(LAYERS)
        return load_layers(source, self._title(LAYERS), compiled=is_compiled) if source else {}

    def _load(self, index: int) -> Stage:
        name, spec = f"stage_{index}.py", self.program.stages[index]
        is_compiled = self.program.fuse == "inductor"
        made = load_stage(self.program.sources[name], self._title(name), self._layers, compiled=is_compiled)
        return made(
            groups=groups_of(self.program, self.world),
            weights=self.params.weights_of_stage(index),
            buffers={buffer: self.buffers[buffer] for buffer in spec.buffers},
            device=self.world.device,
            fused=Fused(str(self.program.fuse or "eager")),
        )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Whatever goes wrong inside: tell the other ranks, and keep nothing of the step."""
        try:
            yield
        except BaseException as exc:
            self.world.report_fault(exc)
            raise
        finally:
            self._begin(())

    def _begin(self, microbatches: Sequence[Microbatch]) -> None:
        self._microbatches = microbatches
        self._kept: dict[tuple[int, int], Kept] = {}
        self._messages.begin()
        self._late: dict[tuple[int, int], list[WeightTerm]] = {}  # what a B left for its W
        for stage in self._stages.values():
            stage.deferred.take()

    def _run(self, microbatches: Sequence[Microbatch], order: Sequence[tuple[Action, str]]) -> None:
        self.params.check_storage()
        self._begin(microbatches)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self._set_totals()
        for action, self.world.at in order:
            if self.watch is None:
                self._do[action.kind](action)
            else:
                self._do_watched(action, self.watch)
            self.world.mark()
        self.world.at = "end of the pipeline"
        self._messages.finish()
        if any(self._late.values()):
            left = [f"B{stage}.{number}" for (stage, number), gemms in sorted(self._late.items()) if gemms]
            raise InternalError(self.world.at, f"no W came for the weight gradients of {', '.join(left)}")

    def _do_watched(self, action: Action, watch: Watch) -> None:
        """Do it as ever, but wait for its messages first, so that its own time is apart from the wait."""
        peers = {Kind.F: self._wires.sources, Kind.B: self._wires.grad_targets}.get(action.kind)
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        for peer in peers[action.stage] if peers else ():
            self._messages.wait_for(Action(receive, action.stage, action.microbatch, peer))
        watch.start(action)
        self._do[action.kind](action)
        watch.end(action)

    def _set_totals(self) -> None:
        """Sum the counts that weighted-mean losses divide by over microbatches and replicas."""
        self.world.at = "count of labels"
        for index, stage in sorted(self._stages.items()):
            if not stage.counts:
                continue
            names = self.program.stages[index].inputs
            counts = [stage.count(**{name: one[name] for name in names}) for one in self._microbatches]
            sums = torch.stack([torch.stack(list(same)).sum().double() for same in zip(*counts, strict=True)])
            sums = self.world.hops(self.world.mesh.batch_axes).all_reduce(sums, "count of labels")
            self.world.mark()
            dtype = self._loss_dtype or self._seen_dtype
            if self._runs_ahead and dtype is not None:  # the second step or a later one
                stage.totals = sums.to(wide(dtype)).unbind()
            else:
                stage.totals = tuple(sums.tolist())  # numbers, so that a loss divided by them keeps its dtype

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        arrived: dict[str, torch.Tensor] = {}
        for source in self._wires.sources[stage]:
            message = self._messages.take(Action(Kind.RECV_F, stage, number, source))
            for spec in self._wires.values[source, stage]:
                arrived[spec.name] = message[spec.name].requires_grad_(
                    spec.has_grad and torch.is_grad_enabled()
                )
        batch = {name: self._microbatches[number][name] for name in self.program.stages[stage].inputs}
        self._stages[stage].drawing = self._drawing(number)
        results = list(self._stages[stage].forward(**arrived, **batch))
        loss = None
        if stage == self.program.loss_stage:
            loss = results.pop()
            self._loss += loss.detach()
            self._seen_dtype = self._seen_dtype or loss.dtype  # of the first step, which divides by numbers
        outputs = {spec.name: x for spec, x in zip(self._wires.outputs[stage], results, strict=True)}
        for target in self._wires.targets[stage]:
            left = {spec.name: outputs[spec.name].detach() for spec in self._wires.values[stage, target]}
            self._messages.leave(Action(Kind.SEND_F, stage, number, target), left)
        if torch.is_grad_enabled():
            edges = {
                spec.name: get_gradient_edge(outputs[spec.name])
                for spec in self._wires.outputs[stage]
                if spec.has_grad and outputs[spec.name].requires_grad
            }
            inputs = {name: x for name, x in arrived.items() if x.requires_grad}
            self._kept[stage, number] = Kept(inputs, edges, loss)

    def _drawing(self, number: int) -> Drawing | None:
        """The dropout masks of a microbatch, which owns its rows of the global batch; an evaluation has none."""
        if not torch.is_grad_enabled():
            return None
        first = (self.world.replica * self.program.num_microbatches + number) * self._rows
        return Drawing(self.program.seed, self.steps, first, self._rows)

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        kept = self._kept.pop((stage, number))
        sums: dict[str, torch.Tensor] = {}
        for target in self._wires.grad_targets[stage]:
            message = self._messages.take(Action(Kind.RECV_B, stage, number, target))
            for name, grad in message.items():
                sums[name] = sums[name] + grad if name in sums else grad
        roots: list[GradientEdge | torch.Tensor] = [edge for name, edge in kept.edges.items() if name in sums]
        grads: list[torch.Tensor | None] = [sums[name] for name in kept.edges if name in sums]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            grads.append(torch.ones_like(kept.loss))
        if len(roots) == 1 and roots[0] is kept.loss:
            torch.autograd.backward(kept.loss)  # autograd makes the 1 itself, without looking at shapes
        elif roots:
            torch.autograd.backward(roots, grads)  # type: ignore[arg-type]
        self._late[stage, number] = self._stages[stage].deferred.take()
        for source in self._wires.grad_sources[stage]:
            back = {
                spec.name: _gradient_of(kept.inputs[spec.name])
                for spec in self._wires.gradients[source, stage]
            }
            self._messages.leave(Action(Kind.SEND_B, stage, number, source), back)

    def _weight_gradients(self, action: Action) -> None:
        gemms = self._late.pop((action.stage, action.microbatch))
        for gemm in gemms:
            self.gradients.add(gemm)

    def _global_loss(self) -> torch.Tensor:
        """Sum the loss over replicas and give it to all ranks, in the dtype that the loss stage computes."""
        self.world.at = "loss"
        mesh = self.world.mesh
        # Ranks that have other parts of values compute the same loss.
        total = self.world.hops((*mesh.batch_axes, *mesh.stage_axes)).all_reduce(self._loss, "loss")
        if mesh.pipeline_ranks == 1:
            return total.to(self._seen_dtype)
        if self._loss_dtype is None:
            seen = self.world.hops(mesh.stage_axes).gather_objects(self._seen_dtype, "dtype of the loss")
            self._loss_dtype = next(dtype for dtype in seen if dtype is not None)
        return total.to(self._loss_dtype)

    def _ranks_with_nan(self, own: torch.Tensor) -> list[int]:
        ranks = self.world.everyone().gather_objects(bool(own.isnan()), "which loss is NaN")
        return [rank for rank, is_nan in enumerate(ranks) if is_nan]


def _nan_fault(now: int, step: int, ranks: Sequence[int]) -> RuntimeFault:
    where = f"NaN on rank {', '.join(map(str, ranks))} (last stage)"
    if step == now:
        remedy = "look at this batch and the learning rate, or pass nan='ignore'"
        return RuntimeFault(f"step {step}", f"the loss is {where}; its gradients were dropped", remedy)
    fact = f"the loss of step {step} was {where}, which on CUDA is seen one step later: its gradients were handed over"
    remedy = "go back to a checkpoint from before it, and look at that batch and the learning rate; or pass nan='ignore'"
    return RuntimeFault(f"step {now}", fact, remedy)


def _gradient_of(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
