"""Make the strategies of a graph, once for all tied nodes.

In: a `Splitter`, and which node each is tied to (`ties.py`). Out: strategies by node, made on first use.

    strategies = Strategies(splitter, ties.same)
    strategies[node]            # all of them
    strategies.of(node, 2)      # one: those of a tied node are not made for it
"""

from __future__ import annotations

from torch.fx import Node

from autoptd.ir.operators.record import operands
from autoptd.passes.solve.strategies import Splitter, make_strategies
from autoptd.passes.solve.strategy import Strategy


class Strategies(dict[Node, list[Strategy]]):
    """The strategies of every node, made on first use; tied nodes have those of the node they are tied to."""

    def __init__(self, splitter: Splitter, same: dict[Node, Node]) -> None:
        super().__init__()
        self.splitter, self.same = splitter, same

    def __missing__(self, node: Node) -> list[Strategy]:
        head = self.same.get(node, node)
        if head is node:
            self[node] = make_strategies(node, self.splitter)
        else:
            counterpart = _counterparts(head, node)
            self[node] = [_moved(strategy, counterpart) for strategy in self[head]]
        return self[node]

    def of(self, node: Node, i: int) -> Strategy:
        """Return one strategy of a node."""
        head = self.same.get(node, node)
        if head is node or node in self:
            return self[node][i]
        return _moved(self[head][i], _counterparts(head, node))

    def alike(self, node: Node) -> list[Strategy]:
        """Return the strategies of the node that `node` is tied to: the same, of that one's operands."""
        return self[self.same.get(node, node)]


def _counterparts(head: Node, node: Node) -> dict[Node, Node]:
    """Return the operand of `node` for each of `head`, the node that it is tied to."""
    # Operands in order, each once: the k-th of layer 3 stands for the k-th of layer 0.
    return dict(zip(dict.fromkeys(operands(head)), dict.fromkeys(operands(node)), strict=True))


def _moved(strategy: Strategy, counterpart: dict[Node, Node]) -> Strategy:
    """Return a strategy for other operands."""
    needs = {counterpart[operand]: types for operand, types in strategy.needs.items()}
    return Strategy(needs, strategy.gives, strategy.seconds, strategy.why, strategy.form)


__all__ = ["Strategies"]
