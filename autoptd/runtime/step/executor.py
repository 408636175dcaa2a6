"""Run the actions of one pipeline rank: a step (forward, backward, sums of gradients) or an evaluation.

In: a program, this rank's world and parameters, and the microbatches of its replica, each a dict of batch
inputs. Out: the global loss, equal on every rank, and `parameter.grad`.

A *message* from one stage to another holds the values of crossings for one microbatch or, on the way back,
their gradients (`messages.py`). An F saves for its B the received tensors, whose `.grad` is sent back, and
the *gradient edges* of its outputs. The outputs themselves are freed once sent, unless autograd saved them.

    executor = Executor(program, world, params)
    loss = executor.step([{"ids": x, "targets": y} for x, y in microbatches])
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autoptd.errors import InternalError, RuntimeFault
from autoptd.ir.actions import COMPUTES, Action, Kind
from autoptd.kernels.forms import wide
from autoptd.program.program import Program
from autoptd.runtime.ops.linear import WeightTerm
from autoptd.runtime.params.gradients import Gradients
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.step.buffers import KnownBuffers, receive_buffers
from autoptd.runtime.step.messages import Messages, Wires
from autoptd.runtime.step.per_step import (
    BUFFERS,
    LABELS,
    SUMS,
    UPDATES,
    BufferUpdates,
    add_nothing,
    chosen_inputs,
    count_batch,
    load_updates,
    set_batch_sums,
    sum_loss,
)
from autoptd.runtime.step.stage import LAYERS, Methods, Stage, load_layers, load_stage
from autoptd.runtime.step.timeline import Watch
from autoptd.runtime.world.flags import HostValue
from autoptd.runtime.world.world import World

Microbatch = Mapping[str, torch.Tensor]
FORWARD = (Kind.F, Kind.SEND_F, Kind.RECV_F)


@dataclass
class SavedForBackward:
    """The inputs of one backward, by crossing: received tensors, and the edges of outputs."""

    inputs: dict[str, torch.Tensor]
    edges: dict[str, GradientEdge]
    loss: torch.Tensor | None


class Executor:
    """Run the stages of one rank. Creating it is a collective: rank 0's buffers are broadcast.

    It can be reused after an exception if all ranks stopped. Buffers equal to those in `known` are shared.
    """

    def __init__(
        self, program: Program, world: World, params: RankParameters, known: KnownBuffers | None = None
    ) -> None:
        self.program, self.world, self.params = program, world, params
        self._fingerprint = program.fingerprint()
        self.steps = 0
        # Called at the start and the end of every action while a step is timed.
        self.watch: Watch | None = None
        # With their texts, which become `world.at`: formatting them in every step would cost time.
        self._order = [(action, str(action)) for action in program.orders[world.pipeline_rank]]
        self._rows = program.mask_rows
        self._wires, self._messages = Wires(program), Messages(program, world)
        self.buffers = receive_buffers(program, world, known)
        self.stages: dict[int, Stage] = {}
        for spec in program.stages:
            if program.rank_of_stage(spec.index) == world.pipeline_rank:
                self.stages[spec.index] = self._load(spec.index)
        self._updates: BufferUpdates | None = None
        if program.updated:
            updates = load_updates(program, self._title(UPDATES))
            self._updates = updates(program, self.buffers, world.device)
        # Of the last evaluation, until they are taken.
        self.outputs: dict[str, list[torch.Tensor]] = {}
        # The dtype of the loss: seen on the rank of the loss stage, agreed on at the end of the first step.
        self._seen_dtype: torch.dtype | None = None
        self._loss_dtype: torch.dtype | None = None
        self._loss_scale: float | None = None
        self._nan = NanWatch(world.device)
        # On CUDA the host queues work ahead of the device, and must not synchronize within a step.
        self._runs_ahead = world.device.type == "cuda"
        self._do = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._weight_gradients,
            Kind.SEND_F: self._messages.send,
            Kind.SEND_B: self._messages.send,
            Kind.RECV_F: self._messages.receive,
            Kind.RECV_B: self._messages.receive,
            # Looked up late: `gradients` does not exist before the first step.
            Kind.REDUCE: lambda action: self.gradients.reduce(action.stage),
        }
        # ZeRO's stages 2 and 3.
        if not all(spec.is_whole for spec in program.params):
            for kind in COMPUTES:
                self._do[kind] = partial(self._do_gathering, self._do[kind])
        # Dropout draws its masks by the rows of this replica.
        self.replica = world.replica
        self._begin(())

    @cached_property
    def gradients(self) -> Gradients:
        """Return this rank's gradient buffers; allocated at the first step, since evaluation needs none."""
        gradients = Gradients(self.program, self.world, self.params)
        for stage in self.stages.values():
            stage.main_grads = gradients.add
        return gradients

    def take_over(self, other: Executor) -> None:
        """Continue the run of another executor, which ran the last step for other sizes."""
        if "gradients" in other.__dict__:
            other.gradients.detach()
        self.steps, self.watch, self._nan = other.steps, other.watch, other._nan

    @property
    def inputs(self) -> set[str]:
        """Return the names of the batch inputs that this rank's stages read."""
        return {name for spec in self.program.stages if spec.index in self.stages for name in spec.inputs}

    def files(self) -> dict[str, Program]:
        """Return the program by the name that tracebacks use for each of its emitted files."""
        return {self._title(name): self.program for name in self.program.sources}

    def step(
        self, microbatches: Sequence[Microbatch], nan: str = "raise", loss_scale: float | None = None
    ) -> torch.Tensor:
        """Run one step; return the detached loss of the global batch, the same on every rank.

        `microbatches` are this replica's, with at least this rank's `inputs`. A NaN loss raises a RuntimeFault on all
        ranks and drops the gradients, unless `nan="ignore"`; on CUDA it raises one step later. Backward starts from
        `loss_scale` instead of 1; gradients and loss are returned unscaled.
        """
        self.steps, began = self.steps + 1, time.perf_counter()
        with self.guard(), torch.enable_grad():
            self.sum_gradients(microbatches, loss_scale, "gradients")
            loss = self._global_loss()
            self._update_buffers()
            bad = self._nan.look(self.steps, loss, self._loss) if nan == "raise" else None
            # After all waits for the device, so that a fault found during one of them is raised too.
            self.world.raise_first_fault()
            bad_ranks = self._ranks_with_nan(bad.own) if bad else []
        # All ranks reach this point with the same `bad`: they raise together, and no rank waits for another.
        if bad:
            self.gradients.drop()
            raise nan_fault(self.steps, bad.step, bad_ranks)
        self.gradients.commit(loss_scale)
        self.world.at = "between steps"
        if self.steps == 1 and self.world.rank == 0 and self.program.fuse == "inductor":
            took = time.perf_counter() - began
            print(
                f"autoptd: the first step, including the compilation of its layers, took {took:.1f} s",
                file=sys.stderr,
            )
        return loss

    def sum_gradients(self, microbatches: Sequence[Microbatch], loss_scale: float | None, site: str) -> None:
        """Run all microbatches forward and backward, and add gradients up; within `guard`."""
        self._loss_scale = loss_scale
        for stage in self.stages.values():
            stage.fused.loss_scale = loss_scale
        self.gradients.begin()
        self._run(microbatches, self._order)
        self.world.at = site
        self.gradients.finish()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the loss of the global batch, without gradients; a replica may lack microbatches."""
        forward = [pair for pair in self._order if pair[0].kind in FORWARD]
        with self.guard():
            count = len(microbatches)
            if self.params.units is not None and count < self.program.num_microbatches:
                microbatches = self._with_stand_ins(microbatches)
            order = [pair for pair in forward if pair[0].microbatch < len(microbatches)]
            self._run(microbatches, order, count)
            self.outputs = {name: x for stage in self.stages.values() for name, x in stage.outputs.items()}
            loss = self._global_loss()
            self._update_buffers()
            self.world.raise_first_fault()
        self.world.at = "between steps"
        return loss

    def _with_stand_ins(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return as many microbatches as other replicas have, which gather parameters together; only the first count."""
        given = [dict(microbatch) for microbatch in microbatches]
        if not given:
            # Zeros are indices that exist everywhere.
            given.append({})
            for spec in self.program.inputs:
                dtype = getattr(torch, spec.dtype)
                given[0][spec.name] = torch.zeros(spec.shape, dtype=dtype, device=self.world.device)
        return given + given[:1] * (self.program.num_microbatches - len(given))

    def _title(self, name: str) -> str:
        """Return the name of an emitted file in tracebacks: `linecache` is global, so it is unique."""
        return f"<{name} of program {self._fingerprint}>"

    @cached_property
    def _layers(self) -> Methods:
        """Return the methods that stages share: loaded once, so that inductor compiles them once."""
        is_compiled, source = self.program.fuse == "inductor", self.program.sources.get(LAYERS)
        return load_layers(source, self._title(LAYERS), compiled=is_compiled) if source else {}

    def _load(self, index: int) -> Stage:
        name, spec = f"stage_{index}.py", self.program.stages[index]
        is_compiled = self.program.fuse == "inductor"
        stage_class = load_stage(
            self.program.sources[name], self._title(name), self._layers, compiled=is_compiled
        )
        stage = stage_class(
            groups={axis: self.world.group((axis,)) for axis in self.program.stage_axes},
            weights=self.params.weights_of_stage(index),
            buffers={buffer: self.buffers[buffer] for buffer in spec.buffers},
            device=self.world.device,
            fuse=str(self.program.fuse or "eager"),
        )
        stage.activations.units = self.params.units
        if not is_compiled:
            self.params.wait_where_read(index, stage.weights)
        return stage

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Report an exception to the other ranks, and free all tensors of the step."""
        try:
            yield
        except BaseException as exc:
            self.world.report_fault(exc)
            if self.params.units is not None:
                self.params.units.abandon()
            raise
        finally:
            self._begin(())

    def _begin(self, microbatches: Sequence[Microbatch]) -> None:
        self._microbatches = microbatches
        # Both by (stage, microbatch): from an F to its B, and from a B to its W.
        self._saved: dict[tuple[int, int], SavedForBackward] = {}
        self._deferred_wgrads: dict[tuple[int, int], list[WeightTerm]] = {}
        self._messages.begin()
        # An aborted backward may have left deferred GEMMs.
        for stage in self.stages.values():
            stage.deferred.take()
            stage.parts = {}
            stage.outputs = {}

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        order: Sequence[tuple[Action, str]],
        count: int | None = None,
    ) -> None:
        """Run actions; only the first `count` microbatches add to results."""
        self.params.check_storage()
        self.params.absorb_edits()
        # Otherwise stages wait at the first read: compiled code bypasses that, timed actions must not wait.
        if self.watch is not None or self.program.fuse == "inductor":
            self.params.wait()
        self._execute(microbatches, order, count)

    def _execute(
        self,
        microbatches: Sequence[Microbatch],
        order: Sequence[tuple[Action, str]],
        count: int | None = None,
    ) -> None:
        self._begin(microbatches)
        self._count = len(microbatches) if count is None else count
        self._loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self._set_totals()
        computes = [action for action, _ in order if action.kind in COMPUTES]
        self._following: Iterator[Action | None] = iter([*computes[1:], None])
        # The loop sets `world.at`, which faults and recordings read.
        for action, self.world.at in order:
            if self.watch is None:
                self._do[action.kind](action)
            else:
                self._do_watched(action, self.watch)
            self.world.mark()
        if self.params.units is not None:
            self.params.units.free()
        self.world.at = "end of the pipeline"
        self._messages.finish()
        if any(self._deferred_wgrads.values()):
            deferred = sorted(self._deferred_wgrads.items())
            left = [f"B{stage}.{number}" for (stage, number), gemms in deferred if gemms]
            raise InternalError(
                self.world.at, f"no W action computed the weight gradients of {', '.join(left)}"
            )

    def _do_gathering(self, do: Callable[[Action], None], action: Action) -> None:
        """Run an F, B or W whose parameters are gathered for it, or whose gradients are reduced after it."""
        following, units = next(self._following), self.params.units
        if units is not None:
            units.begin(action, following, waits=self.program.fuse == "inductor")
        do(action)
        if torch.is_grad_enabled():
            self.gradients.left(action, following)
        if units is not None:
            units.end()

    def _do_watched(self, action: Action, watch: Watch) -> None:
        """Wait for the action's messages, then time it with `watch.start` and `watch.end`."""
        peers = {Kind.F: self._wires.sources, Kind.B: self._wires.grad_targets}.get(action.kind)
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        for peer in peers[action.stage] if peers else ():
            self._messages.wait_for(Action(receive, action.stage, action.microbatch, peer))
        watch.start(action)
        self._do[action.kind](action)
        watch.end(action)

    def _set_totals(self) -> None:
        """Compute the divisors of weighted means and the sums over the batch, before the first forward."""
        group = self.world.hops(self.world.mesh.batch_axes)
        # In one order on all ranks: the sums are collectives.
        for index, stage in sorted(self.stages.items()):
            if not self._microbatches:
                add_nothing(self.program, index, group, self.world.device)
                continue
            names = self.program.stages[index].inputs
            inputs = chosen_inputs(self._microbatches[: self._count or 1], names)
            # Labels and their weights may depend on sums: counts come after them.
            if stage.rounds:
                self.world.at = SUMS
                set_batch_sums(
                    stage, inputs, lambda own, op: group.all_reduce(self._counted(own, op), SUMS, op)
                )
                self.world.mark()
            if stage.counts:
                self.world.at = LABELS
                sums = group.all_reduce(self._counted(count_batch(stage, inputs)), LABELS)
                self.world.mark()
                dtype = self._loss_dtype or self._seen_dtype
                if self._runs_ahead and dtype is not None:
                    stage.totals = sums.to(wide(dtype)).unbind()
                else:
                    # The loss's dtype is unknown in the first step. Python numbers do not change it; tensors would.
                    stage.totals = tuple(sums.tolist())

    def _counted(self, own: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return this replica's part of a sum or maximum over the batch: nothing if it only has a stand-in."""
        return own if self._count else torch.full_like(own, -math.inf if op == "max" else 0.0)

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        arrived: dict[str, torch.Tensor] = {}
        for source in self._wires.sources[stage]:
            message = self._messages.take(Action(Kind.RECV_F, stage, number, source))
            for spec in self._wires.values[source, stage]:
                # A received tensor is a leaf: `_backward` sends the `.grad` that autograd leaves in it.
                wants_grad = spec.has_grad and torch.is_grad_enabled()
                arrived[spec.name] = message[spec.name].requires_grad_(wants_grad)
        batch = {name: self._microbatches[number][name] for name in self.program.stages[stage].inputs}
        self._choose_masks(self.stages[stage], number)
        running = self.stages[stage]
        kept, is_own = (running.parts, running.outputs), number < self._count
        if not is_own:
            running.parts, running.outputs = {}, {}
        results = list(running.run(**arrived, **batch))
        if not is_own:
            running.parts, running.outputs = kept
        loss = None
        if stage == self.program.loss_stage:
            loss = results.pop()
            if is_own:
                self._loss += loss.detach()
            # Only the first step's dtype is the model's own: later ones may divide by tensors.
            self._seen_dtype = self._seen_dtype or loss.dtype
        outputs = {spec.name: x for spec, x in zip(self._wires.outputs[stage], results, strict=True)}
        for target in self._wires.targets[stage]:
            left = {spec.name: outputs[spec.name].detach() for spec in self._wires.values[stage, target]}
            self._messages.leave(Action(Kind.SEND_F, stage, number, target), left)
        if torch.is_grad_enabled():
            # Edges instead of outputs: backward needs only the nodes, so the memory of the outputs is freed.
            edges = {
                spec.name: get_gradient_edge(outputs[spec.name])
                for spec in self._wires.outputs[stage]
                if spec.has_grad and outputs[spec.name].requires_grad
            }
            inputs = {name: x for name, x in arrived.items() if x.requires_grad}
            self._saved[stage, number] = SavedForBackward(inputs, edges, loss)

    def _choose_masks(self, stage: Stage, number: int) -> None:
        """Choose the dropout masks of a microbatch, by its first row in the global batch; none in evaluations."""
        if torch.is_grad_enabled():
            first = (self.replica * self.program.num_microbatches + number) * self._rows
            stage.draw_masks(self.program.seed, self.steps, first, self._rows)
        else:
            stage.drawing = None

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        saved = self._saved.pop((stage, number))
        # A crossing that several stages read gets the sum of their gradients.
        sums: dict[str, torch.Tensor] = {}
        for target in self._wires.grad_targets[stage]:
            message = self._messages.take(Action(Kind.RECV_B, stage, number, target))
            for name, grad in message.items():
                sums[name] = sums[name] + grad if name in sums else grad
        roots: list[GradientEdge | torch.Tensor] = []
        grads: list[torch.Tensor | None] = []
        for name, edge in saved.edges.items():
            if name in sums:
                roots.append(edge)
                grads.append(sums[name])
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            grads.append(self._seed(saved.loss))
        if len(roots) == 1 and roots[0] is saved.loss and self._loss_scale is None:
            # The common case of the last stage: autograd creates the 1, and skips its shape checks.
            torch.autograd.backward(saved.loss)
        elif roots:
            torch.autograd.backward(roots, grads)  # type: ignore[arg-type]
        self._deferred_wgrads[stage, number] = self.stages[stage].deferred.take()
        for source in self._wires.grad_sources[stage]:
            specs = self._wires.gradients[source, stage]
            back = {spec.name: _gradient_of(saved.inputs[spec.name]) for spec in specs}
            self._messages.leave(Action(Kind.SEND_B, stage, number, source), back)

    def _seed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient from which backward starts."""
        if self._loss_scale is None:
            return torch.ones_like(loss)
        # A scale that overflows the dtype of the loss becomes infinite, and is found as such.
        return torch.full_like(loss, self._loss_scale, dtype=wide(loss.dtype)).to(loss.dtype)

    def _weight_gradients(self, action: Action) -> None:
        gemms = self._deferred_wgrads.pop((action.stage, action.microbatch))
        # `add` completes buckets, as the hooks do in backward: after the last W a bucket's sum may start.
        for gemm in gemms:
            self.gradients.add(gemm)

    def _global_loss(self) -> torch.Tensor:
        """Sum the loss over replicas, and return it on all ranks in the dtype of the loss stage."""
        self.world.at = "loss"
        total = sum_loss(self.world, self._loss)
        mesh = self.world.mesh
        # A replica without rows has not seen the dtype.
        axes = mesh.axes if 0 in self.program.row_counts else mesh.stage_axes
        ranks = self.world.hops(axes)
        if self._loss_dtype is None and ranks.size > 1:
            seen = ranks.gather_objects(self._seen_dtype, "dtype of the loss")
            self._loss_dtype = next(dtype for dtype in seen if dtype is not None)
        return total.to(self._loss_dtype or self._seen_dtype)

    def _update_buffers(self) -> None:
        """Update the buffers that the forward updates, once per step, even if its gradients are discarded."""
        if self._updates is not None:
            self.world.at = BUFFERS
            self._updates.run(list(self.stages.values()), self.world)
            self.world.mark()

    def _ranks_with_nan(self, own: torch.Tensor) -> list[int]:
        ranks = self.world.everyone().gather_objects(bool(own.isnan()), "which loss is NaN")
        return [rank for rank, is_nan in enumerate(ranks) if is_nan]


def _gradient_of(x: torch.Tensor) -> torch.Tensor:
    # No gradient reached `x`, but its source still waits for one.
    return torch.zeros_like(x) if x.grad is None else x.grad


class StepLoss(NamedTuple):
    """A step's number, and the part of its loss that this rank computed."""

    step: int
    own: torch.Tensor


class NanWatch:
    """The check that all ranks make at the end of every step; with `is_late`, of the step before."""

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type == "cuda"
        self._pending: tuple[StepLoss, HostValue] | None = None

    def look(self, step: int, loss: torch.Tensor, own: torch.Tensor) -> StepLoss | None:
        """Return the step whose check is due, if its loss was NaN, else None."""
        check: tuple[StepLoss, HostValue] | None = StepLoss(step, own), HostValue(loss.isnan())
        if self.is_late:
            check, self._pending = self._pending, check
        if check is None or not check[1].read():
            return None
        # The step since then used the NaN gradients: its own check would only report the same fault again.
        self._pending = None
        return check[0]


def nan_fault(now: int, step: int, ranks: Sequence[int]) -> RuntimeFault:
    """Return the fault of a loss that was NaN in `step` on `ranks`, and is reported in step `now`."""
    where = f"NaN on rank {', '.join(map(str, ranks))} (last stage)"
    if step == now:
        remedy = "look at this batch and the learning rate, or pass ranks=RankOptions(nan='ignore')"
        return RuntimeFault(f"step {step}", f"the loss is {where}; its gradients were dropped", remedy)
    fact = f"the loss of step {step} was {where}, which on CUDA is seen one step later: "
    fact += "its gradients were already added to parameter.grad"
    remedy = (
        "go back to a checkpoint from before it, and look at that batch and the learning rate; "
        "or pass ranks=RankOptions(nan='ignore')"
    )
    return RuntimeFault(f"step {now}", fact, remedy)
