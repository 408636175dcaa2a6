"""Send and receive the messages of one rank's stages: pack and scatter, gather and unpack.

In: a program, with its transfer buffers (`program/transfers.py`: which values are packed together, and which are
scattered over tp), this rank's world, and the values of crossings by name, or their gradients. Out: `Wires`, tables that
list which stage sends which crossings to which others; and the same values on the rank of the other stage. A stage of the
same rank receives the tensors themselves.

    wires, messages = Wires(program), Messages(program, world)
    wires.values[0, 1]                  # the crossings that stage 1 reads from stage 0
    messages.leave(SEND_F0.1>1, {"x_from_0": x})    # after F0.1: keeps only the values to be sent
    messages.send(SEND_F0.1>1)                      # never waits
    messages.receive(RECV_F1.1<0)                   # allocates the buffers and posts; never waits
    messages.take(RECV_F1.1<0)["x_from_0"]          # waits, then gathers over tp

A scattered buffer is gathered by the F or B that needs it, not when it arrives: tensor ranks run these in one
order, so their gathers match. Memory: a received buffer lives from its RECV to the F or B, a sent one from
the F or B until the send completes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autoptd.errors import InternalError
from autoptd.ir.actions import Action, Kind
from autoptd.program.program import Program
from autoptd.program.specs import CrossingSpec, TransferBuffer
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.world.world import Channel, Group, Pending, World

Tensor = torch.Tensor
ANSWER = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


class Messages:
    """What this rank's stages send to other stages, and receive from them, in one step."""

    def __init__(self, program: Program, world: World) -> None:
        self._program, self._world = program, world
        self._shapes = {crossing.name: crossing.shape for crossing in program.crossings}
        # By (source, target, is_gradient), in the program's order: sender and receiver pack and unpack by it.
        self._buffers: dict[tuple[int, int, bool], list[TransferBuffer]] = {}
        for buffer in program.transfers:
            key = buffer.source, buffer.target, buffer.is_gradient
            self._buffers.setdefault(key, []).append(buffer)
        self.begin()

    def begin(self) -> None:
        """Forget the messages of the step before, also where it was aborted."""
        # Messages between stages of this rank, by the RECV that would have received them.
        self._handed: dict[Action, Mapping[str, Tensor]] = {}
        # Receives by RECV, packed buffers by SEND, and sends that may not have completed.
        self._arriving: dict[Action, Pending] = {}
        self._leaving: dict[Action, list[Tensor]] = {}
        self._sent: list[Pending] = []

    def leave(self, send: Action, values: Mapping[str, Tensor]) -> None:
        """Pack a message for its SEND, or hand it over if the other stage is on this rank."""
        if self._program.rank_of_stage(send.peer) == self._world.pipeline_rank:
            self._handed[Action(ANSWER[send.kind], send.peer, send.microbatch, send.stage)] = values
            return
        buffers, group = self._buffers_of(send), self._world.group(self._world.mesh.value_axes)
        packed = sorted(name for buffer in buffers for name in buffer.names)
        if packed != sorted(values):
            raise InternalError(str(send), f"has to send {sorted(values)}, but has buffers for {packed}")
        self._leaving[send] = [pack(buffer, values, group) for buffer in buffers]

    def wait_for(self, receive: Action) -> None:
        """Wait until a message has arrived; `take` returns it afterwards."""
        if receive in self._arriving:
            self._arriving[receive].wait()

    def take(self, receive: Action) -> Mapping[str, Tensor]:
        """Return a message, once; waits until it has arrived."""
        if receive in self._handed:
            return self._handed.pop(receive)
        if receive not in self._arriving:
            raise InternalError(self._world.at, f"needs {receive}, which was not posted")
        values: dict[str, Tensor] = {}
        arrived = self._arriving.pop(receive).wait()
        for buffer, x in zip(self._buffers_of(receive), arrived, strict=True):
            values |= self._unpack(buffer, x)
        return values

    def send(self, action: Action) -> None:
        """Start to send the message packed for `action`."""
        if action not in self._leaving:
            raise InternalError(str(action), "has nothing to send")
        self._free_completed()
        self._sent.append(self._channel(action).send(self._leaving.pop(action), str(action)))

    def receive(self, action: Action) -> None:
        """Allocate the buffers of a message and post their receive."""
        self._free_completed()
        like = [((buffer.piece,), dtype_of(buffer.dtype)) for buffer in self._buffers_of(action)]
        self._arriving[action] = self._channel(action).receive(like, str(action))

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for pending in self._sent:
            pending.wait()
        self._sent.clear()

    def _free_completed(self) -> None:
        """Free the buffers of completed sends."""
        for pending in self._sent:
            if pending.is_done():
                # Returns at once, and raises the error of a send that failed.
                pending.wait()
        self._sent = [pending for pending in self._sent if not pending.is_done()]

    def _buffers_of(self, action: Action) -> list[TransferBuffer]:
        # An action names its own stage first: a SEND the source, a RECV the target.
        ends = (action.stage, action.peer) if action.kind in ANSWER else (action.peer, action.stage)
        return self._buffers.get((*ends, action.kind in (Kind.SEND_B, Kind.RECV_B)), [])

    def _channel(self, action: Action) -> Channel:
        peer = self._world.mesh.at_stage(self._world.rank, self._program.rank_of_stage(action.peer))
        return self._world.outgoing(peer) if action.kind in ANSWER else self._world.incoming(peer)

    def _unpack(self, buffer: TransferBuffer, arrived: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a buffer by crossing: views of its memory."""
        flat = gather(buffer, arrived, self._world.group(self._world.mesh.value_axes))
        shapes = [torch.Size(self._shapes[name]) for name in buffer.names]
        parts = flat.split([shape.numel() for shape in shapes])
        return {name: x.view(shape) for name, x, shape in zip(buffer.names, parts, shapes, strict=True)}


def pack(buffer: TransferBuffer, values: Mapping[str, Tensor], group: Group) -> Tensor:
    """Return what this tensor rank sends of a buffer, flat: [numel], or its [piece].

    A piece is a copy, so that it does not keep the memory of the whole.
    """
    tensors = [values[name].detach().reshape(-1) for name in buffer.names]
    flat = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if buffer.parts == 1:
        return flat
    # The last rank's piece may be short: it is filled up with zeros.
    piece = flat.new_zeros(buffer.piece)
    mine = flat[group.index * buffer.piece : (group.index + 1) * buffer.piece]
    piece[: len(mine)] = mine
    return piece


def gather(buffer: TransferBuffer, arrived: Tensor, group: Group) -> Tensor:
    """Return the whole buffer, flat [numel], from what this tensor rank received."""
    if buffer.parts == 1:
        return arrived
    site = f"{buffer.site} backward" if buffer.is_gradient else buffer.site
    return group.all_gather(arrived, 0, site)[: buffer.numel]


Peers = dict[int, list[int]]


class Wires:
    """The crossings between stages: `values[source, target]` go forward; the gradients of
    `gradients[source, target]` return from target to source.

    The other tables list the peers of every stage, ascending.
    """

    def __init__(self, program: Program) -> None:
        spec_of = {crossing.name: crossing for crossing in program.crossings}
        self.outputs: dict[int, list[CrossingSpec]] = {}
        self.values: dict[tuple[int, int], list[CrossingSpec]] = {}
        self.gradients: dict[tuple[int, int], list[CrossingSpec]] = {}
        # In the order of the program, by which both ends of a message pack and unpack.
        for stage in program.stages:
            self.outputs[stage.index] = [spec_of[name] for name in stage.outputs]
            for crossing in self.outputs[stage.index]:
                for target in crossing.targets:
                    pair = stage.index, target
                    self.values.setdefault(pair, []).append(crossing)
                    # Ids and masks have no gradient to send back.
                    if crossing.has_grad:
                        self.gradients.setdefault(pair, []).append(crossing)
        num_stages = len(program.stages)
        self.sources, self.targets = _peers(self.values, num_stages)
        self.grad_sources, self.grad_targets = _peers(self.gradients, num_stages)


def _peers(pairs: Iterable[tuple[int, int]], num_stages: int) -> tuple[Peers, Peers]:
    """Return two tables by stage, from pairs (source, target): its sources, and its targets."""
    sources: Peers = {stage: [] for stage in range(num_stages)}
    targets: Peers = {stage: [] for stage in range(num_stages)}
    for source, target in sorted(pairs):
        sources[target].append(source)
        targets[source].append(target)
    return sources, targets
