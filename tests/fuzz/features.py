"""What a random decoder can look like: one line of choices per feature, the simplest first, as that is where shrinking goes.

A `Case` is one pick per feature. Picks are independent, so that every pair of them occurs and each shrinks alone; where two do
not go together (three equal parts of a fused weight, but fewer key heads), the properties of `Case` settle it.

    case = draw(cases());  case.heads, case.kv_heads      # 4, 2
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from autoptd.ir.actions import SCHEDULES

MESHES = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (4, 1, 1, 1),
    (3, 1, 1, 1),
    (1, 3, 1, 1),
    (1, 4, 1, 1),
]
MESHES += [
    (1, 2, 1, 2),
    (1, 1, 3, 1),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
    (4, 2, 1, 1),
    (2, 2, 2, 1),
    (2, 2, 1, 2),
]
MESHES += [
    (2, 2, 2, 2),
    (3, 2, 1, 1),
    (2, 3, 1, 1),
    (2, 1, 3, 1),
    (4, 1, 2, 1),
    (2, 4, 1, 1),
    (2, 2, 1, 3),
    (4, 2, 2, 1),
]

LAYER_NUMBERS = [
    "x * (i + 1)",
    "(i + 1) * x",
    "x - (i + 1)",
    "(i - 1) - x",
    "x + (i - 1)",
    "x / (i + 2)",
    "(i + 2) / (x.square() + 1)",
    "(x.square() + 1) ** (i - 1)",
    "(i + 1) ** x.tanh()",
    "x * (i + 1) * 0.5 - x / (i + 1)",
]

# What a key of a ModuleDict or a parameter may be called: all but a dot, and what modules have themselves.
HARD_NAMES = [
    *(
        'a "b"',
        "it's",
        'q"""',
        "back\\slash\\",
        "new\nline",
        "tab\t",
        "carriage\r",
        "a  b",
        " blank",
        "# c",
        "{x}",
        "%s",
    ),
    *(
        "x[0](",
        "[ab]",
        "a*b?",
        "a:b",
        "a/b",
        "<b>&",
        "class",
        "at",
        "run",
        "0",
        "007",
        "日本 😀 ﬁ",
        "(" * 70 + "long" * 20,
    ),
]

CHOICES: dict[str, list[Any]] = {
    "mesh": MESHES,  # t, p, d, v
    "schedule": ["1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zb_2p", "zbv"],
    "microbatches": [1, 2, 4, 3],  # times p where the schedule is interleaved
    "rows": [2, 1, 3],  # of a microbatch
    "layers": [1, 2, 3, 2, 1, 3, 2, 5, 4],  # tracing is most of the time
    "length": [4, 6, 8, 1],
    "vocab": [16, 24, 13, 61, 5],
    "heads per rank": [1, 2, 3],  # times t
    "uneven": ["nothing", "nothing", "nothing", "heads", "mlp", "both"],  # one more than t divides
    "head size": [4, 2, 6],
    "queries per key": [1, 2, 0],  # 0: one key for all
    "wide": [False, True],  # the residual is wider than all heads
    "norm": [
        "layer",
        "none",
        "layer without bias",
        "layer without weight",
        "rms",
        "rms by hand",
        "rms plus one",
    ],
    "norm place": ["before", "after", "both"],
    "final norm": [True, False],
    "bias": [True, False],
    "qkv": [
        *("separate", "three", "pieces", "slices", "per head", "grouped", "grouped split", "transposed"),
        *("keys and values", "keys and values per head", "einsum"),
    ],
    "query norm": ["none", "per head", "all heads"],
    "attention": ["fused", "fused with mask", "fused with bias", "softmax", "where", "additive"],
    "more heads": ["repeat", "expand", "native"],
    "attention cap": [False, True],
    "mask": ["forward", "buffer"],
    "window": [False, True],  # every second layer sees two tokens only
    "padding": [False, True],  # a third input: which tokens may be seen
    "positions": [
        "none",
        "learned",
        "sliced",
        "sines",
        "rotary halves",
        "rotary pairs",
        "rotary complex",
        "slopes",
    ],
    "activation": ["gelu", "relu", "silu", "squared relu", "quick gelu", "gelu tanh"],
    "gate": ["none", "separate", "fused", "glu", "paired"],
    "mlp per rank": [4, 2, 3],  # times t
    "residual": ["serial", "parallel"],
    "residual scale": ["none", "number", "vector", "scalar"],
    "dropout": [0.0, 0.0, 0.1, 0.4],  # at the places of the next five lines
    "dropout of embedding": [False, True],
    "dropout of attention": [False, True],
    "dropout of branches": [False, True],
    "dropout in mlp": [False, True],
    "dropout by": ["module", "function", "in place"],
    "stream": ["bsh", "sbh", "folded"],
    "stack": ["list", "shared", "sequential", "in turn"],  # the last: two blocks, each several times
    "embedding scale": [False, True],
    "head": ["own", "assigned", "functional", "matmul"],
    "head bias": [False, True],
    "logit cap": [False, True],
    "frozen": ["nothing", "embedding", "first layer"],
    "loss": ["flat", "classes", "gathered", "log-softmax"],
    "reduction": ["mean", "sum", "none"],
    "ignored": ["nothing", "default", "zero"],
    "smoothing": [0.0, 0.1],
    "class weights": [False, True],
    "shift": ["outside", "slices", "padded"],
    "second loss": ["none", "z", "decay"],
    "result": ["loss", "tuple", "dict", "loss_fn"],
    "hooks": ["none", "overlap", "main", "after_b", "before_reduce", "all"],  # of linear layers
    "precision": [None, "bf16", "fp16", "bf16-mixed", "fp16-mixed"],
    "zero": [0, 1],
    "dp shard": [None, 2],  # replicas that share a state
    "skips": [
        "none",
        "first to last",
        "first to all",
        "nested",
        "nested and joined",
    ],  # of the residual between layers
    "memory": ["none", "embedding", "encoder"],  # that all layers attend to
    "p2p": ["auto", "scatter_gather", "direct"],
    "sequence parallel": ["no", "auto", "yes"],
    "machine": ["sizes decide", "default", "shared heads", "slow products"],  # by which plans are weighed
    "layer number": ["none", *LAYER_NUMBERS],  # on both sides of every operator
    "value head": [False, True],  # a linear layer whose weight has one dim
    "parameter name": [
        "none",
        "w",
        "F",
        "tp",
        "rt",
        "torch",
        "b",
        *HARD_NAMES[:12],
    ],  # that emitted code may have itself
    "buffer": ["none", "kept", "loaded", "mask loaded"],  # a state dict brings other values of it
    "call": ["names", "positions", "None between", "number between"],
    "steps": [2, 4],
    "reduce dtype": ["fp32", "bf16"],
    "recompute": [None, "full", "selective", "full:1/2", ["*"], ["*norm*", "*act*"], "auto"],
    "room": [None, 0.97, 0.9],  # of what the fullest rank takes without a bound on memory
    "context": [1, 2, 4],  # ranks with a part of the tokens each
    "attention by": ["auto", "all_gather"],  # such ranks
    "token order": ["auto", "zigzag", "contiguous"],
    "name of layers": ["layers", *HARD_NAMES[2:]],
}


@dataclass(frozen=True)
class Case:
    """One pick per feature, by the feature's name; the sizes that follow from them."""

    picks: dict[str, Any]

    def __getitem__(self, feature: str) -> Any:
        return self.picks[feature]

    def drops(self, place: str) -> bool:
        """Whether there is dropout at a place: "of embedding", "of attention", "of branches", "in mlp"."""
        return bool(self["dropout"] and self[f"dropout {place}"])

    def drops_in_place(self, place: str) -> bool:
        """Only values that are no views, and that no backward needs (as those of softmax and relu do), can be written to."""
        if self["dropout by"] != "in place" or place == "of attention":
            return False
        if place == "of branches":
            return self["stream"] == "bsh" and self["qkv"] != "transposed"
        return place == "of embedding" or self["gate"] != "none" or self["activation"] != "relu"

    @property
    def t(self) -> int:
        return self["mesh"][0]

    @property
    def schedule(self) -> str:
        """What was asked for, or one like it that runs v chunks."""
        _, p, _, v = self["mesh"]
        if p == 1:
            return "1f1b"
        asked: str = self["schedule"]
        if SCHEDULES[asked] in (0, v):
            return asked
        if v == 1:
            return "zb_h1"
        return (
            "zbv"
            if v == 2 and asked.startswith("zb")
            else "looped_bfs"
            if asked == "gpipe"
            else "interleaved"
        )

    @property
    def hooks(self) -> str:
        """A zero-bubble schedule places the weight gradients itself."""
        asked: str = self["hooks"]
        if not self.schedule.startswith("zb"):
            return asked
        return {"all": "overlap and main", "after_b": "none", "before_reduce": "main"}.get(asked, asked)

    @property
    def precision(self) -> str | None:
        """Has float32 sums of its own; what is loaded into is in float64 already."""
        is_main = "main" in self.hooks or self.hooks == "all"
        return None if is_main or self["buffer"].endswith("loaded") else self["precision"]

    @property
    def reduce_dtype(self) -> str:
        """Gradients are scattered with zero=1 alone."""
        return self["reduce dtype"] if self["zero"] else "fp32"  # type: ignore[no-any-return]

    @property
    def dp_shard(self) -> int | None:
        """Divides the replicas, where they share anything."""
        fits = self["zero"] and self["dp shard"] and self["mesh"][2] % self["dp shard"] == 0
        return self["dp shard"] if fits else None

    @property
    def sequence_parallel(self) -> bool | str:
        """True is refused where the tokens do not divide."""
        asked = self["sequence parallel"]
        if asked == "yes" and self["length"] % self.t == 0:
            return True
        return False if asked == "no" else "auto"

    @property
    def c(self) -> int:
        """Ranks that the tokens divide over, beside those of t where these split them too; 16 at most of all."""
        t, p, d, _ = self["mesh"]
        asked: int = self["context"]
        tokens = self["length"] // t if self.sequence_parallel and self["length"] % t == 0 else self["length"]
        return asked if tokens % asked == 0 and t * p * d * asked <= 16 else 1

    @property
    def by_gathers(self) -> bool:
        """Gathered keys are refused for tokens that do not divide, as those of a memory may not."""
        return self.c > 1 and self["attention by"] == "all_gather" and self["memory"] == "none"

    @property
    def token_order(self) -> str:
        """Zigzag is refused without two pieces for every rank."""
        has_pieces = self.c > 1 and self["length"] % (2 * self.c) == 0
        return self["token order"] if has_pieces or self["token order"] != "zigzag" else "auto"

    @property
    def num_microbatches(self) -> int:
        count, p = self["microbatches"], self["mesh"][1]
        return p * (count % 2 + 1) if self.schedule == "interleaved" else count

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self["rows"] * self.num_microbatches * self["mesh"][2]

    @property
    def queries_per_key(self) -> int:
        asked = self["queries per key"] or self.heads
        equal = self["qkv"] in ("three", "per head")
        return asked if self.heads % asked == 0 and not equal else 1

    @property
    def heads(self) -> int:
        return self.t * self["heads per rank"] + (self["uneven"] in ("heads", "both"))

    @property
    def kv_heads(self) -> int:
        return self.heads // self.queries_per_key

    @property
    def width(self) -> int:
        return self.heads * self["head size"] + (4 * self.t if self["wide"] else 0)

    @property
    def mlp_width(self) -> int:
        return self.t * self["mlp per rank"] + (self["uneven"] in ("mlp", "both"))

    @property
    def attention(self) -> str:
        """A fused attention with a bias where scores are changed or masked in a way of their own."""
        asked: str = self["attention"]
        if asked == "fused" and (self["window"] or self["padding"]):
            return "fused with mask"
        if asked.startswith("fused") and self["positions"] == "slopes":
            return "fused with bias"
        return asked

    @property
    def shift(self) -> str:
        return self["shift"] if self["length"] > 1 else "outside"

    @property
    def stack(self) -> str:
        """Layers in a Sequential take one argument and are all alike."""
        more = self["padding"] or self["positions"] == "rotary halves" or self.skips != "none"
        more = more or self["memory"] != "none" or self["layer number"] != "none"
        return "list" if self["stack"] == "sequential" and more else self["stack"]

    @property
    def buffer(self) -> str:
        """The mask is a buffer only where it is one, and read."""
        is_read = self["mask"] == "buffer" and self.attention != "fused"
        return "loaded" if self["buffer"] == "mask loaded" and not is_read else self["buffer"]

    @property
    def call(self) -> str:
        """Targets of a loss_fn come by name."""
        return "names" if self["result"] == "loss_fn" else self["call"]

    @property
    def skips(self) -> str:
        """One layer has no two halves."""
        return "none" if self["layers"] == 1 else self["skips"]

    @property
    def features(self) -> list[str]:
        """What is in this case, for the tally."""
        settled = {
            "schedule": self.schedule if self["mesh"][1] > 1 else "none",
            "microbatches": self.num_microbatches,
            "attention": self.attention,
            "shift": self.shift,
            "stack": self.stack,
            "skips": self.skips,
            "hooks": self.hooks,
            "precision": self.precision,
            "context": self.c,
            "attention by": ("all_gather" if self.by_gathers else "auto") if self.c > 1 else "none",
            "token order": self.token_order if self.c > 1 else "none",
            "dp shard": self.dp_shard,
            "reduce dtype": self.reduce_dtype,
            "queries per key": self.queries_per_key,
            "buffer": self.buffer,
            "call": self.call,
        }
        return [f"{name}: {settled.get(name, pick)}" for name, pick in self.picks.items()]


def cases(without: Collection[str] = ()) -> st.SearchStrategy[Case]:
    """All cases; of the features in `without`, the simplest choice only."""
    drawn = {name: choices[:1] if name in without else choices for name, choices in CHOICES.items()}
    return st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in drawn.items()}).map(
        Case
    )
