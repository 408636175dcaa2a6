"""What crosses from stage to stage, and what a stage computes again instead (part of CONNECTED -> CUT).

In: the stage of every operator of the *backbone* (what depends on parameters and inputs). Out: `note(node).stages` of every
node, the stages that compute it. It is sent from the first of them to the stages that read it and do not; `placement` says why.

- Parameters, buffers and batch inputs are wherever they are read, and so is what depends on parameters alone: a weight
  never crosses a link.
- Any other value that one stage makes and another reads is computed again where that takes fewer seconds than to send it
  (forward, and its gradient back): from what the reader has anyway, or from a smaller value that is sent in its place. Views
  and casts of a value that crosses, position ids, masks and rotary tables are the usual cases. A large sort or matrix product
  of inputs is computed once and sent, without gradient.
- Never computed again: matrix products of activations, dropout, losses, and what reads a parameter that is not there; of a
  stage that has nothing of the kind the last operator that takes time, so that no stage is left empty. Labels whose number a
  loss divides by are never sent: they are counted before the first forward.

    place_values(graph, {embed: 0, block: 0, head: 1}, mesh=Mesh(), machine=Machine())
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import inf

from torch.fx import Graph, Node

from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import is_tensor, note, ops
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import operator_of
from autoptd.passes.ops.costs import flops, local_payload, rank_seconds

LONGEST = 8  # operators on activations in a chain that is computed again
AGAIN, HERE = "computed again", "computed where it is read"
Ways = dict[
    tuple[Node, bool], float
]  # what it takes to have a value on a stage: (value, is it sent) -> seconds


def place_values(graph: Graph, home: Mapping[Node, int], mesh: Mesh, machine: Machine) -> None:
    """Fill `stages` and `placement` of every node; `home` is the stage of every node of the backbone."""
    places = _Places(graph, home, mesh, machine)
    for stage in range(1 + max(home.values())):
        places.serve(stage)
    for node in reversed(graph.nodes):
        found = {stage for user in node.users for stage in note(user).stages}
        if node.op == "output":
            found = {home[node.args[0]]}  # type: ignore[index]
        elif node in places.computed:
            made = places.computed[node]
            found = (made & found) | ({min(made)} if found - made else set())
        note(node).stages = tuple(sorted(found))
        note(node).placement = places.tell(node) if node.op == "call_function" else ""


def is_never_computed_again(node: Node) -> bool:
    """What has one place in the backbone: GEMMs, random numbers and losses."""
    record = operator_of(node)
    return bool(flops(node)) or record.is_random or record.counts_labels


class _Places:
    """Which stage computes what, `computed`, filled stage by stage; why it is sent, or computed on more than one."""

    def __init__(self, graph: Graph, home: Mapping[Node, int], mesh: Mesh, machine: Machine) -> None:
        self.home, self.mesh, self.machine = home, mesh, machine
        self.computed: dict[Node, set[int]] = {node: {stage} for node, stage in home.items()}
        self.sent: dict[tuple[Node, int], str] = {}
        self.again: dict[tuple[Node, int], str] = {}
        self.counted = _counted(graph, home)
        self.alone = _alone(home, mesh, machine)
        self.weights: dict[
            Node, set[int]
        ] = {}  # parameters, and what is made of them alone: stages that have it anyway
        self.wanted: dict[int, list[Node]] = defaultdict(
            list
        )  # what a stage reads and does not make, in model order
        for node in reversed(graph.nodes):
            stages = {home[user] for user in node.users if user in home}
            if note(node).of_params and node not in home:
                self.weights[node] = stages.union(*(self.weights.get(user, ()) for user in node.users))
            elif node.op == "call_function":
                for stage in stages - {home.get(node)}:
                    self.wanted[stage].insert(0, node)

    def serve(self, stage: int) -> None:
        """Decide how `stage` comes by every value that it reads."""
        for node in self.wanted[stage]:
            ways = self._ways(node, stage, {})
            there = _microseconds(self._seconds_to_send(node, stage))
            for one, is_sent in ways:
                if is_sent:
                    self.sent[one, stage] = _microseconds(ways[one, is_sent])
                else:
                    self.computed.setdefault(one, set()).add(stage)
                    what = "it" if one is node else node.name
                    self.again[one, stage] = (
                        f"{_microseconds(ways[one, is_sent])}; to send {what} takes {there}"
                    )

    def tell(self, node: Node) -> str:
        """Why a node is on several stages, elsewhere than in the order of the model, or sent; "" where it is read at home."""
        stages = note(node).stages
        if node in self.weights:
            return "of parameters alone: computed on every stage that reads it" if len(stages) > 1 else ""
        said = ["computed where it is read"] if node not in self.home and len(stages) > 1 else []
        if node in self.home:
            again = [f"on stage {k} in {self.again[node, k]}" for k in stages if (node, k) in self.again]
            said += [f"computed again {', '.join(again)}"] if again else []
        readers = sorted({k for user in node.users for k in note(user).stages} - set(stages))
        sent = [f"to stage {k} in {self.sent[node, k]}" for k in readers if (node, k) in self.sent]
        return "; ".join([*said, f"sent {', '.join(sent)}: less than to compute it again"] if sent else said)

    def _ways(self, node: Node, stage: int, seen: dict[Node, Ways], left: int = LONGEST) -> Ways:
        """The cheapest way to have `node` on `stage`."""
        sent: Ways = {(node, True): self._seconds_to_send(node, stage)}
        must = sent[node, True] == inf
        again: Ways = {(node, False): self._seconds_again(node, must)}
        for one in sorted(
            node.all_input_nodes, key=flops, reverse=True
        ):  # what must be sent usually settles the matter
            if not must and _cost(again) >= _cost(sent):
                return sent
            if not self._is_there(one, stage):
                if one not in seen:
                    seen[one] = self._have(one, stage, seen, left)
                again |= seen[one]
        return again if must or _cost(again) < _cost(sent) else sent

    def _have(self, node: Node, stage: int, seen: dict[Node, Ways], left: int) -> Ways:
        """The same of an operand, where the chain may end."""
        if node in self.weights:
            return {(node, True): inf}
        if node in self.home and not left:
            return {(node, True): self._seconds_to_send(node, stage)}
        return self._ways(node, stage, seen, left - (node in self.home))

    def _is_there(self, node: Node, stage: int) -> bool:
        """Whether `stage` has `node` whatever is decided."""
        if node in self.weights:
            return stage in self.weights[node]
        is_made = stage in self.computed.get(node, ()) or (node, stage) in self.sent
        return node.op == "placeholder" or is_made or node in self.wanted[stage]

    def _seconds_to_send(self, node: Node, stage: int) -> float:
        """To send a value to one more stage and its gradient back; infinite where nobody before has it to send."""
        if (
            not is_tensor(node)
            or node in self.counted
            or not any(one < stage for one in self.computed.get(node, ()))
        ):
            return inf
        return (1 + note(node).needs_grad) * send_seconds(node, self.mesh, self.machine)

    def _seconds_again(self, node: Node, must: bool) -> float:
        if not must and is_never_computed_again(node) and (node in self.home or not flops(node)):
            return inf
        if not must and node in self.alone:
            return inf
        return rank_seconds(node, self.mesh, self.machine) / (1 if note(node).needs_grad else 3)


def send_seconds(node: Node, mesh: Mesh, machine: Machine) -> float:
    """Seconds of one message with a rank's part of a value."""
    return machine.message + local_payload(node, mesh) / machine.link_bandwidth


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us" if seconds >= 1e-7 else "<0.1 us"


def _cost(ways: Ways) -> float:
    return sum(ways.values())


def _alone(home: Mapping[Node, int], mesh: Mesh, machine: Machine) -> set[Node]:
    """What a stage is left for that would only make what others can compute again: its last operator that takes time."""
    last = {stage: node for node, stage in home.items() if rank_seconds(node, mesh, machine)}
    settled = {stage for node, stage in home.items() if is_never_computed_again(node)}
    return {node for stage, node in last.items() if stage not in settled}


def _counted(graph: Graph, home: Mapping[Node, int]) -> set[Node]:
    """Labels and class weights that a loss may divide by the number of, with all that they are made from."""
    found: set[Node] = set()
    stack = [one for node in ops(graph) if operator_of(node).counts_labels for one in operands(node)[1:]]
    while stack:
        node = stack.pop()
        if node not in found and node not in home:
            found.add(node)
            stack += node.all_input_nodes
    return found


__all__ = ["is_never_computed_again", "place_values", "send_seconds"]
