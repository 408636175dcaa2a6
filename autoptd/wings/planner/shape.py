"""Define the shape of a decoder-only transformer, all that the performance model needs, and read it from a config.

In: a mapping with the fields of `Shape` (the first four are required), or an object with a `config` with the names
of nanoGPT or Hugging Face. Out: a `Shape`, which counts parameters. No torch is imported: a parameter is something
with `numel()`.

    gpt3 = find_shape({"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048})
    gpt3.parameters                     # 174_615_846_912
    shape_of(GPT(GPTConfig())).layers   # 12

Facts missing from a config (two or three matrices in an MLP, biases, learned positions, a tied head) are chosen to
match the model's number of parameters, trying a plain GPT or Llama first. If nothing matches, as for a mixture of
experts, that is a PlanError.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.plan import check_known

FLAGS = ("biases", "positions", "tied", "dropout")
# Fields that may be left out: 0 stands for what a GPT has.
DERIVED = ("ffn", "kv_heads", "head_dim")
# Field of Shape -> its names in configs; the first that a config has counts.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("n_layer", "num_hidden_layers", "num_layers", "n_layers"),
    "hidden": ("n_embd", "hidden_size", "d_model", "n_embed"),
    "heads": ("n_head", "num_attention_heads", "n_heads", "num_heads"),
    "seq": ("block_size", "n_positions", "max_position_embeddings", "max_seq_len", "n_ctx"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "ffn": ("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "n_query_groups"),
    "head_dim": ("head_dim",),
}
NEEDED = ("layers", "hidden", "heads", "seq")
TIED = ("tie_word_embeddings", "tie_embeddings")
DROPOUTS = ("dropout", "resid_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout", "residual_dropout")
# How far a shape's number of parameters may be off the model's, relative.
MAX_ERROR = 0.02


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
                raise PlanError(f"shape: {name}={value!r}", "is not a positive integer", f"{name}=...")
        if not self.head_dim and self.hidden % self.heads:
            fact = f"is not divisible by {self.heads} heads"
            remedy = f"a multiple of {self.heads}, or head_dim=..."
            raise PlanError(f"shape: hidden={self.hidden}", fact, remedy)
        usual = (4 * self.hidden, self.heads, self.hidden // self.heads)
        for name, size in zip(DERIVED, usual, strict=True):
            if not getattr(self, name):
                object.__setattr__(self, name, size)
        for name in FLAGS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.mlp_matrices == 2)
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"shape: {name}={getattr(self, name)!r}", "is not a bool", f"{name}=True")
        if self.mlp_matrices not in (2, 3):
            fact = "an MLP has two or three matrices"
            raise PlanError(f"shape: mlp_matrices={self.mlp_matrices}", fact, "2 (GPT) or 3 (gated)")
        # Each KV head serves the same number of query heads.
        if self.heads % self.kv_heads:
            fact = f"does not divide {self.heads} heads"
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
        """Elements of one norm: a weight, and with biases a bias."""
        return self.hidden * (2 if self.biases else 1)

    @property
    def layer_matrices(self) -> int:
        """Elements of a layer's weight matrices: what tensor parallelism splits."""
        # Q and the projection have the width of the queries, K and V that of the keys.
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return attention + self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_split_biases(self) -> int:
        """Elements of a layer's split biases: those of QKV and of the MLP's first matrices."""
        widths = self.query_width + 2 * self.kv_width + (self.mlp_matrices - 1) * self.ffn
        return widths if self.biases else 0

    @property
    def layer_whole(self) -> int:
        """Elements of a layer that every tensor rank holds: two norms, biases of the two row-split layers."""
        return 2 * self.norm_parameters + (2 * self.hidden if self.biases else 0)

    @property
    def layer_parameters(self) -> int:
        return self.layer_matrices + self.layer_split_biases + self.layer_whole

    @property
    def parameters(self) -> int:
        """Elements of the model, a tied matrix counted once: for a GPT SC'21's equation 2, plus the last norm."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.seq * self.hidden if self.positions else 0
        return self.layers * self.layer_parameters + embeddings + positions + self.norm_parameters


def find_shape(given: Shape | Mapping[str, Any]) -> Shape:
    """Return a Shape: `given` itself, or one with the fields of a mapping."""
    if isinstance(given, Shape):
        return given
    remedy = "pass at least layers, hidden, heads and seq"
    if not isinstance(given, Mapping):
        raise PlanError("shape", f"{type(given).__name__} is not a mapping", remedy)
    check_known("shape", given, [field.name for field in dataclasses.fields(Shape)])
    missing = [name for name in NEEDED if given.get(name) is None]
    if missing:
        raise PlanError("shape", f"{', '.join(missing)} missing", remedy)
    return Shape(**{name: value for name, value in given.items() if value is not None})


def shape_of(given: Any) -> Shape:
    """Return the Shape of a shape, a mapping, or a model with a config; PlanError if the config lacks a size."""
    if isinstance(given, Shape | Mapping):
        return find_shape(given)
    config = getattr(given, "config", None)
    if config is None:
        remedy = "pass a mapping with layers, hidden, heads and seq"
        raise PlanError("plan: model", f"{type(given).__name__} has no config to read its shape from", remedy)
    shape = shape_of_config(config)
    if not hasattr(given, "parameters"):
        return shape
    count = sum(parameter.numel() for parameter in given.parameters())
    # First a plain GPT and a plain Llama with their head tied or not; then all that a config leaves open.
    for free in (("tied",), ("tied", "biases", "positions")):
        families = _families(shape, _flags(config), free)
        found = min(families, key=lambda family: abs(family.parameters - count))
        if abs(found.parameters - count) <= MAX_ERROR * count:
            return found
    fact = f"{type(given).__name__} has {count:,} parameters, but a decoder with its config's sizes {found.parameters:,}"
    raise PlanError("plan: model", fact, "pass a mapping with the real sizes instead of the model")


def shape_of_config(config: Any, mlp_matrices: int = 2) -> Shape:
    """Read a Shape from a config (an object or a mapping), as a GPT or, with 3 `mlp_matrices`, as a Llama."""
    sizes = {}
    for field, names in NAMES.items():
        if value := _first(config, names):
            sizes[field] = value
    missing = [field for field in NEEDED if field not in sizes]
    if missing:
        tried = "; ".join(f"{field}: {', '.join(NAMES[field])}" for field in missing)
        fact = f"its config has no {', '.join(missing)} ({tried})"
        raise PlanError("plan: model", fact, "pass a mapping instead")
    return find_shape({**sizes, **_flags(config), "mlp_matrices": mlp_matrices})


def _families(shape: Shape, known: Mapping[str, bool], free: Sequence[str]) -> Iterator[Shape]:
    """Yield the shape as a GPT and as a Llama, with every value of the `free` flags that the config does not set."""
    for matrices in (2, 3):
        usual = dict.fromkeys(("biases", "positions", "tied", "dropout"), matrices == 2)
        # The usual values of a family come first: `min` keeps the first of shapes that fit equally well.
        for values in itertools.product((matrices == 2, matrices != 2), repeat=len(free)):
            flags = {**usual, **dict(zip(free, values, strict=True)), **known}
            yield replace(shape, mlp_matrices=matrices, **flags)


def _flags(config: Any) -> dict[str, bool]:
    """Return the flags that the config sets: ties and dropout."""
    found: dict[str, bool] = {}
    for name in TIED:
        tied = _value(config, name)
        if isinstance(tied, bool):
            # The first that the config has.
            found.setdefault("tied", tied)
    for name in DROPOUTS:
        rate = _value(config, name)
        if isinstance(rate, int | float):
            found["dropout"] = found.get("dropout", False) or rate > 0
    return found


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = _value(config, name)
        # Configs have None, 0 or -1 for values that are derived.
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
