"""Decide which values cross from stage to stage, and which a stage computes again instead (part of CONNECTED -> CUT).

In: the stage of every operator of the *backbone* (operators that depend on parameters and inputs). Out:
`note(node).stages` of every node, the stages that compute it, with the reason in `stages_why`. A value is sent from
the first of its stages to those that read it and do not compute it.

- Parameters, buffers and batch inputs are on every stage that reads them, and so are values that depend on
  parameters alone: a weight never crosses a link.
- Any other value that one stage makes and another reads is computed again if that takes fewer seconds than sending it
  (forward, and its gradient back): from values that the reader has in any case, or from a smaller value that is sent
  instead. Views and casts of a value that crosses, position ids, masks and rotary tables are the usual cases. A large
  sort or matrix product of inputs is computed once and sent, without gradient.
- Never computed again: matrix products of activations, dropout, losses, and readers of a parameter that the stage
  does not have. In a stage without any of these, the last operator that takes time is not computed elsewhere either,
  so that no stage is left empty. Labels whose number a loss divides by are never sent: they are counted before the
  first forward.

    place_values(graph, {embed: 0, block: 0, head: 1}, mesh=Mesh(), machine=Machine())
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import inf

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import is_tensor, note, ops
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import operator_of
from autoptd.ir.quantities import microseconds_text
from autoptd.passes.ops.costs import flops, local_payload, passes_of, rank_seconds

# The most operators on activations in a chain that is computed again.
MAX_OPERATORS_OF_CHAIN = 8
# The steps that bring a value to a stage: (value, whether it is sent or else computed there) -> seconds.
Recipe = dict[tuple[Node, bool], float]


def place_values(graph: Graph, home: Mapping[Node, int], mesh: Mesh, machine: Machine) -> None:
    """Fill `stages` and `stages_why` of every node; `home` is the stage of every node of the backbone."""
    places = _Places(graph, home, mesh, machine)
    for stage in range(1 + max(home.values())):
        places.serve(stage)
    # From the end, so that the stages of all readers are known.
    for node in reversed(graph.nodes):
        stages = _reading_stages(node)
        if node.op == "output":
            stages = {home[node.args[0]]}  # type: ignore[index]
        elif node in places.computed:
            computed = places.computed[node]
            if node not in home:
                # A value of parameters alone has its operands on every stage, regardless of the values sent there.
                computed |= {stage for stage in stages if (node, stage) not in places.sent}
            # A stage that reads a value and does not compute it receives it from the first one that does.
            is_sent = bool(stages - computed)
            stages &= computed
            if is_sent:
                stages.add(min(computed))
        note(node).stages = tuple(sorted(stages))
        note(node).stages_why = places.reason(node) if node.op == "call_function" else ""


def _reading_stages(node: Node) -> set[int]:
    stages: set[int] = set()
    for user in node.users:
        stages.update(note(user).stages)
    return stages


def is_never_computed_again(node: Node) -> bool:
    """Tell whether an operator has a single place in the backbone: a GEMM, random numbers, a loss."""
    record = operator_of(node)
    return bool(flops(node)) or record.is_random or record.counts_labels


class _Places:
    """The stages that compute each value, filled stage by stage, with the reasons.

    - `computed`: the stages that compute a node. `sent`, `again`: by (node, stage), the seconds to send it there or to
      compute it again there, as text.
    - `counted`: labels, which are never sent. `alone`: the last operators of stages that could lose all of them.
    - `weights`: parameters and values of parameters alone, with the stages that have them in any case.
    - `wanted`: the values that a stage reads and does not make, in model order.
    """

    def __init__(self, graph: Graph, home: Mapping[Node, int], mesh: Mesh, machine: Machine) -> None:
        self.home, self.mesh, self.machine = home, mesh, machine
        self.computed: dict[Node, set[int]] = {node: {stage} for node, stage in home.items()}
        self.sent: dict[tuple[Node, int], str] = {}
        self.again: dict[tuple[Node, int], str] = {}
        self.counted = _counted(graph, home)
        self.alone = _alone(home, mesh, machine)
        self.weights: dict[Node, set[int]] = {}
        self.wanted: dict[int, list[Node]] = defaultdict(list)
        for node in reversed(graph.nodes):
            stages = {home[user] for user in node.users if user in home}
            if note(node).of_params and node not in home:
                self.weights[node] = stages.union(*(self.weights.get(user, ()) for user in node.users))
            elif node.op == "call_function":
                for stage in stages - {home.get(node)}:
                    self.wanted[stage].insert(0, node)

    def serve(self, stage: int) -> None:
        """Decide for every value that `stage` reads whether it is sent there or computed again."""
        for node in self.wanted[stage]:
            recipe = self._recipe(node, stage, {})
            sending = microseconds_text(self._seconds_to_send(node, stage))
            for (value, is_sent), seconds in recipe.items():
                if is_sent:
                    self.sent[value, stage] = microseconds_text(seconds)
                else:
                    self.computed.setdefault(value, set()).add(stage)
                    subject = "it" if value is node else node.name
                    self.again[value, stage] = (
                        f"{microseconds_text(seconds)}; to send {subject} takes {sending}"
                    )

    def reason(self, node: Node) -> str:
        """Return why a node is on several stages, or sent; "" if only its own stage reads it."""
        stages = note(node).stages
        if node in self.weights:
            return "of parameters alone: computed on every stage that reads it" if len(stages) > 1 else ""
        reasons = []
        if node not in self.home and len(stages) > 1:
            reasons.append("computed where it is read")
        if node in self.home:
            again = [f"on stage {k} in {self.again[node, k]}" for k in stages if (node, k) in self.again]
            if again:
                reasons.append(f"computed again {', '.join(again)}")
        readers = sorted(_reading_stages(node) - set(stages))
        sent = [f"to stage {k} in {self.sent[node, k]}" for k in readers if (node, k) in self.sent]
        if sent:
            reasons.append(f"sent {', '.join(sent)}: less than to compute it again")
        return "; ".join(reasons)

    def _recipe(
        self, node: Node, stage: int, seen: dict[Node, Recipe], left: int = MAX_OPERATORS_OF_CHAIN
    ) -> Recipe:
        """Return the cheapest recipe for `node` on `stage`: sent, or computed there along with its operands.

        `seen` has the recipes of other values for the same stage; `left` is how much longer the chain may get.
        """
        sent: Recipe = {(node, True): self._seconds_to_send(node, stage)}
        # A value that cannot be sent must be computed, at any cost.
        must = sent[node, True] == inf
        again: Recipe = {(node, False): self._seconds_again(node, must)}
        # Matrix products first: that they must be sent usually decides.
        for operand in sorted(node.all_input_nodes, key=flops, reverse=True):
            if not must and _cost(again) >= _cost(sent):
                return sent
            if not self._is_there(operand, stage):
                if operand not in seen:
                    seen[operand] = self._recipe_of_operand(operand, stage, seen, left)
                again |= seen[operand]
        return again if must or _cost(again) < _cost(sent) else sent

    def _recipe_of_operand(self, node: Node, stage: int, seen: dict[Node, Recipe], left: int) -> Recipe:
        """Return the cheapest recipe for an operand; a chain ends at a weight, or when it gets too long."""
        if node in self.weights:
            return {(node, True): inf}
        if node in self.home and not left:
            return {(node, True): self._seconds_to_send(node, stage)}
        return self._recipe(node, stage, seen, left - (node in self.home))

    def _is_there(self, node: Node, stage: int) -> bool:
        """Tell whether `stage` has `node` in any case."""
        if node in self.weights:
            return stage in self.weights[node]
        is_decided = stage in self.computed.get(node, ()) or (node, stage) in self.sent
        return node.op == "placeholder" or is_decided or node in self.wanted[stage]

    def _seconds_to_send(self, node: Node, stage: int) -> float:
        """Return the seconds to send a value to one more stage, and its gradient back.

        They are infinite if the value cannot be sent, or if no earlier stage computes it.
        """
        first = min(self.computed.get(node, ()), default=stage)
        if not is_tensor(node) or node in self.counted or first >= stage:
            return inf
        return (1 + note(node).needs_grad) * send_seconds(node, self.mesh, self.machine)

    def _seconds_again(self, node: Node, must: bool) -> float:
        if not must and is_never_computed_again(node) and (node in self.home or not flops(node)):
            return inf
        if not must and node in self.alone:
            return inf
        # Without a gradient there is only a forward.
        return rank_seconds(node, self.mesh, self.machine) / (1 if note(node).needs_grad else passes_of(node))


def send_seconds(node: Node, mesh: Mesh, machine: Machine) -> float:
    """Return the seconds of one message with a rank's part of a value."""
    return machine.message + local_payload(node, mesh) / machine.link_bandwidth


def _cost(recipe: Recipe) -> float:
    return sum(recipe.values())


def _alone(home: Mapping[Node, int], mesh: Mesh, machine: Machine) -> set[Node]:
    """Find the last operator that takes time in every stage whose operators could all be computed again elsewhere.

    If this one were too, the stage would be left empty.
    """
    last = {stage: node for node, stage in home.items() if rank_seconds(node, mesh, machine)}
    settled = {stage for node, stage in home.items() if is_never_computed_again(node)}
    return {node for stage, node in last.items() if stage not in settled}


def _counted(graph: Graph, home: Mapping[Node, int]) -> set[Node]:
    """Find the values that are summed before the first forward, with all their ancestors.

    These are the labels and class weights by whose sum a loss may divide, and the operands of batch sums.
    """
    counted: set[Node] = set()
    stack: list[Node] = []
    for node in ops(graph):
        if operator_of(node).counts_labels:
            stack += operands(node)[1:]
        elif node.target is markers.batch_sum:
            stack.append(node)
    while stack:
        node = stack.pop()
        if node not in counted and node not in home:
            counted.add(node)
            stack += node.all_input_nodes
    return counted
