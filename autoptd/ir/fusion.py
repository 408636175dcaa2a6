"""Fused operators of a program, and operators that were not fused, with the reason: one record for all layers.

Fusion("rms_norm", "model.layers.*.input_layernorm", times=12)
Fusion("attention", "h.*.attn", times=12, why="its mask needs a gradient")      # not fused
Fusion("rms_norm", "norm", form="by torch's operators: ...")                    # fused, but without a kernel
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

# Options name the fused operators, and `autoptd --help` loads no torch.
if TYPE_CHECKING:
    from torch.fx import Node

# Bytes of logits that a chunked loss holds at a time. A GPU needs few chunks: each one reads and writes the
# weight's gradient again, and launches some thirty kernels.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# The minimum rows of a chunk: fewer make slow matrix products.
CHUNK_ROWS = 128
# Operators with kernels in autoptd/kernels.
OURS = "masked_softmax bias_gelu swiglu geglu rms_norm layer_norm rotary".split()
OURS += ["bias_dropout_add", "linear_cross_entropy"]
# Elements of a row that a Triton program keeps in registers; wider rows spill (benchmarks/registers.py).
WIDEST = {"rms_norm": 1 << 14, "layer_norm": 1 << 14, "masked_softmax": 1 << 15}
# The first three, and a layer_norm without a sum, are operators of torch.
FUSED = ("attention", "gelu", "silu", *OURS)


@dataclass(frozen=True)
class Fusion:
    """`times` operators at `site` (with a star for the layer) are fused to `op`, or are not because of `why`.

    `form` is the reason why a fused operator does not use its backend's kernel, else "".
    """

    op: str
    site: str
    times: int = 1
    why: str = ""
    form: str = ""


def counts(fusions: tuple[Fusion, ...]) -> str:
    """Format the fused operators and their numbers, in the order of first use: `rms_norm x 9, swiglu x 4`; "" for nothing."""
    times_of: dict[str, int] = {}
    for fusion in fusions:
        if not fusion.why:
            times_of[fusion.op] = times_of.get(fusion.op, 0) + fusion.times
    return ", ".join(f"{op} x {times}" for op, times in times_of.items())


@dataclass(frozen=True)
class Swapped:
    """An operand of a fused operator with its last two dims swapped."""

    node: Node


Operand: TypeAlias = "Node | Swapped | None"


@dataclass(frozen=True)
class Group:
    """Operators that one fused operator can replace.

    `operands` and `keywords` are those of the fused operator. It also takes the literals of the member `literals`, which
    are known once shapes are local. `members` includes the `result`, the only one that other operators read. `moved` are
    the views between a head and its loss, in order.
    """

    op: str
    result: Node
    operands: tuple[Operand, ...]
    members: frozenset[Node]
    keywords: dict[str, Any] = field(default_factory=dict)
    literals: Node | None = None
    moved: tuple[Node, ...] = ()

    def on(self, copies: dict[Node, Node]) -> Group:
        """Return the same group of a copied graph."""

        def copied(operand: Operand) -> Operand:
            if operand is None:
                return None
            if isinstance(operand, Swapped):
                return Swapped(copies[operand.node])
            return copies[operand]

        return replace(
            self,
            result=copies[self.result],
            operands=tuple(map(copied, self.operands)),
            members=frozenset(copies[member] for member in self.members),
            literals=None if self.literals is None else copies[self.literals],
            moved=tuple(copies[view] for view in self.moved),
        )


@dataclass(frozen=True)
class Refusal:
    """The reason why operators that look like a fused one are not fused."""

    op: str
    result: Node
    why: str


@dataclass(frozen=True)
class Groups:
    """The groups of a CONNECTED graph that a backend can fuse, and the refusals."""

    chosen: tuple[Group, ...] = ()
    refused: tuple[Refusal, ...] = ()
    backend: str | bool = False


Found = Group | Refusal | None
