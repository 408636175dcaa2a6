"""Read the shape of an existing model from its `config`, with the names of nanoGPT and Hugging Face.

In: a `Shape`, a mapping, or an object with `config` (its parameters are counted where it has `parameters()`).
Out: a `Shape`. No torch is imported: a parameter is something with `numel()`.

    shape_of(GPT(GPTConfig())).layers      # 12

Facts missing from a config (two or three matrices in an MLP, biases, learned positions, a tied head) are
chosen to match the number of parameters, trying a plain GPT or Llama first. If nothing matches, as for a
mixture of experts, that is a PlanError.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoptd.errors import PlanError
from autoptd.wings.planner.shape import Shape, find_shape

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


def shape_of(given: Any) -> Shape:
    """Return the Shape of a shape, a mapping, or a model with a config.

    PlanError names what the config does not say.
    """
    if isinstance(given, Shape | Mapping):
        return find_shape(given)
    config = getattr(given, "config", None)
    if config is None:
        remedy = "a mapping with layers, hidden, heads and seq"
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
    fact = f"{type(given).__name__} has {count:,} parameters, a decoder of its config's sizes {found.parameters:,}"
    raise PlanError("plan: model", fact, "a mapping of the sizes that it really has instead of the model")


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
        raise PlanError("plan: model", fact, "a mapping instead")
    return find_shape({**sizes, **_flags(config), "mlp_matrices": mlp_matrices})


def _families(shape: Shape, said: Mapping[str, bool], free: Sequence[str]) -> Iterator[Shape]:
    """Yield the shape as a GPT and as a Llama, with every value of the `free` flags.

    What the config says stays.
    """
    for matrices in (2, 3):
        usual = dict.fromkeys(("biases", "positions", "tied", "dropout"), matrices == 2)
        # The usual values of a family come first: `min` keeps the first of shapes that fit equally well.
        for values in itertools.product((matrices == 2, matrices != 2), repeat=len(free)):
            flags = {**usual, **dict(zip(free, values, strict=True)), **said}
            yield replace(shape, mlp_matrices=matrices, **flags)


def _flags(config: Any) -> dict[str, bool]:
    """Return what the config says of ties and dropout."""
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
        # Configs have None, 0 or -1 for derived values.
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


__all__ = ["shape_of", "shape_of_config"]
