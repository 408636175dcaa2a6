"""Define the shape of a decoder-only transformer: all that the performance model needs, without a trace.

In: a mapping with the keys below (the first four are needed). Out: a `Shape`, which counts parameters.

    gpt3 = find_shape({"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048})
    gpt3.parameters     # 174_615_846_912
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.plan import check_known

FLAGS = ("biases", "positions", "tied", "dropout")
# Fields that may be left out: 0 stands for what a GPT has.
DERIVED = ("ffn", "kv_heads", "head_dim")


@dataclass(frozen=True)
class Shape:
    """Sizes are numbers of elements; 0 and None stand for what a GPT has.

    `layers` L, `hidden` h, `heads` a, `seq` s, `vocab` V, `ffn` the inner width of the MLP (4h), `kv_heads`
    key and value heads (a), `head_dim` width of a head (h/a), `mlp_matrices` 2 (up, down) or 3 (gate, up,
    down: SwiGLU and its like). `biases` of linear layers, learned `positions`, a head `tied` to the
    embedding, and `dropout` on the residual branches and attention: by default, a model with two MLP
    matrices is a GPT and has all four, one with three a Llama and none. Without learned positions queries and
    keys are rotated; a Llama's norms have a weight and no bias.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int = 51200
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mlp_matrices: int = 2
    biases: bool | None = None
    positions: bool | None = None
    tied: bool | None = None
    dropout: bool | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        for name in [name for name in names if name not in FLAGS]:
            # 0 is allowed where it stands for what a GPT has, and is replaced below.
            value, least = getattr(self, name), 0 if name in DERIVED else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(
                    f"shape: {name}={value!r}", "a size is a whole number of at least 1", f"{name}=..."
                )
        if not self.head_dim and self.hidden % self.heads:
            fact = f"{self.hidden} elements do not divide over {self.heads} heads"
            raise PlanError(
                f"shape: hidden={self.hidden}", fact, f"a multiple of {self.heads}, or head_dim=..."
            )
        for name, usual in zip(
            DERIVED, (4 * self.hidden, self.heads, self.hidden // self.heads), strict=True
        ):
            if not getattr(self, name):
                # The class is frozen for others: this is still its construction.
                object.__setattr__(self, name, usual)
        for name in FLAGS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.mlp_matrices == 2)
            if not isinstance(getattr(self, name), bool):
                raise PlanError(
                    f"shape: {name}={getattr(self, name)!r}", "is neither true nor false", f"{name}=True"
                )
        if self.mlp_matrices not in (2, 3):
            fact = "an MLP has two or three"
            raise PlanError(f"shape: mlp_matrices={self.mlp_matrices}", fact, "2 (GPT) or 3 (gated)")
        # Each KV head serves the same number of query heads.
        if self.heads % self.kv_heads:
            fact = f"{self.heads} heads do not divide over them"
            raise PlanError(f"shape: kv_heads={self.kv_heads}", fact, "a divisor of heads")

    @property
    def query_width(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def norm_parameters(self) -> int:
        """Of one norm: a weight, and with biases a bias."""
        return self.hidden * (2 if self.biases else 1)

    @property
    def layer_matrices(self) -> int:
        """Elements of a layer's weight matrices: what tensor parallelism splits."""
        # Q and the projection have the width of the queries, K and V that of the keys.
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return attention + self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_split_biases(self) -> int:
        """Elements of the biases of a layer that tensor parallelism splits: those of QKV and of the MLP's
        first matrices.
        """
        widths = self.query_width + 2 * self.kv_width + (self.mlp_matrices - 1) * self.ffn
        return widths if self.biases else 0

    @property
    def layer_whole(self) -> int:
        """Elements of a layer's parameters that every tensor rank holds: two norms, biases of the two
        row-split layers.
        """
        return 2 * self.norm_parameters + (2 * self.hidden if self.biases else 0)

    @property
    def layer_parameters(self) -> int:
        return self.layer_matrices + self.layer_split_biases + self.layer_whole

    @property
    def parameters(self) -> int:
        """Of the model, a tied matrix counted once; SC'21's equation 2 for a GPT, and the last norm."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.seq * self.hidden if self.positions else 0
        return self.layers * self.layer_parameters + embeddings + positions + self.norm_parameters


def find_shape(given: Shape | Mapping[str, Any]) -> Shape:
    """Return the Shape that is meant: itself, or one of a mapping with its fields."""
    if isinstance(given, Shape):
        return given
    if not isinstance(given, Mapping):
        raise PlanError(
            "shape", f"{type(given).__name__} is not a mapping", "layers, hidden, heads and seq at least"
        )
    names = [field.name for field in dataclasses.fields(Shape)]
    check_known("shape", given, names)
    # Layers, hidden, heads and seq: the only fields without a default.
    missing = [name for name in names[:4] if given.get(name) is None]
    if missing:
        raise PlanError("shape", f"{', '.join(missing)} not given", "layers, hidden, heads and seq at least")
    return Shape(**{name: value for name, value in given.items() if value is not None})


__all__ = ["Shape", "find_shape"]
