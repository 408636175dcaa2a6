"""Cases with a seed: a model of drawn parts, a mesh, and a script.

    python -m tests.hostile.attack --cases 300 --seed 11
    python -m tests.hostile.attack --show 17 --seed 11         # its source, run alone

Every table is gone through in a drawn order, so that its parts come up equally often; a case takes some odd parts and leaves
the others plain, so that what is refused hides little.
"""

from __future__ import annotations

import itertools
import math
import random
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.hostile.attack.parts import MIXERS, MLPS, NORMS, NUMBERS, Part
from tests.hostile.attack.whole import CALLS, HEADS, LOOPS, MEMORIES, SHARED, STARTS, STATES, Call
from tests.hostile.judge import Script

SOURCE = """\
import functools, math
from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PIECES, B, L, W, H, V, N = {sizes}
D = W // H
DTYPE = torch.float64
Out, Four = namedtuple("Out", "loss logits more"), namedtuple("Four", "ids y keep values")


@dataclass
class Record:
    logits: torch.Tensor
    loss: torch.Tensor


COUNTS = {{"calls": 0}}


@functools.lru_cache(maxsize=None)
def table(length, width):
    return torch.outer(torch.linspace(0, 1, length), torch.ones(width))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * ctx.scale * grad, None


class Mixer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
{mixer_init}

    def forward(self, h, keep, memory):
{mixer}


class Mlp(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
{mlp_init}

    def forward(self, h):
{mlp}


class Block(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i, self.mixer, self.mlp = i, Mixer(i), Mlp(i)
{norm_init}

    def norm1_weight(self):
        found = (p for name, p in self.named_parameters() if name.startswith("norm1") and p.dim() == 1)
        return next(found, torch.zeros(W))

    def forward(self, h, keep, memory):
        i = self.i
{block}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(N))
{init}

    def forward(self, {takes}):
{forward}


def make(variant):
    torch.manual_seed(3 + variant)
    return Net().to(DTYPE)


loss_fn = {loss_fn}


def packed(*args, **kwargs):
    return args, kwargs


def batch(step, rows):
    draw = torch.Generator().manual_seed(50 + step)
    ids, y = (torch.randint(0, V, (rows, L), generator=draw) for _ in range(2))
    keep = torch.arange(L) < torch.randint(1, L + 1, (rows, 1), generator=draw)
    values = torch.randn(rows, L, 3, generator=draw, dtype=torch.float64).to(DTYPE)
    return packed({passes})
"""
BLOCKS = [  # {1} and {2} are the norms, {c} the line with the layer's numbers
    "h = h + self.mixer({1}, keep, memory)\n{c}\nreturn h + self.mlp({2})",
    "{c}\nh = h + self.mixer({1}, keep, memory)\nreturn h + self.mlp({2})",
    "h = h + self.mixer({1}, keep, memory)\nh = h + self.mlp({2})\n{c}\nreturn h",
    "h = h + self.mixer(h, keep, memory)\nh = {1}\n{c}\nh = h + self.mlp(h)\nh = {2}\nreturn h",
    "x = h\nh = {1}\n{c}\nh = x + self.mixer(h, keep, memory) + self.mlp(h)\nreturn {2}",
    "x = h\nh = {1}\nh = self.mixer(h, keep, memory)\n{c}\nh = x + h\nreturn h + self.mlp({2})",
]
LOSS_FNS = [
    "lambda logits, y: F.cross_entropy(logits.mT, y)",
    "lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=1)",
    "lambda logits, y: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, V), y.view(-1))",
    "lambda logits, y: F.mse_loss(logits.softmax(-1), F.one_hot(y, V).to(logits.dtype))",
]
SIZES = [(16, 4), (8, 4), (8, 2), (16, 2), (24, 4)]
DEGREES = [
    (1, 1, 1),
    (2, 1, 1),
    (4, 1, 1),
    (3, 1, 1),
    (1, 2, 1),
    (1, 3, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 2, 1),
    (2, 2, 2),
]
DEGREES += [(2, 3, 1), (4, 2, 1), (2, 1, 2), (1, 2, 2)]
SWITCHES: list[dict[str, Any]] = [
    {"sequence_parallel": True},
    {"sequence_parallel": "auto"},
    {"fuse": False},
    {"p2p": "scatter_gather"},
    {"async_tensor_model_parallel_allreduce": True},
    {"accumulate_allreduce_grads_in_fp32": False},
    {"delay_wgrad_compute": "after_b"},
    {"sequence_parallel": True, "async_tensor_model_parallel_allreduce": True, "p2p": "scatter_gather"},
    {"machine": {"latency": 1e-9, "per_saved_byte": 1e-12}},
    {"machine": {"latency": 1e-9, "per_saved_byte": 1e-12}, "sequence_parallel": True},
]


@dataclass(frozen=True)
class Case:
    number: int
    names: tuple[str, ...]  # of the parts that are not plain
    source: str
    script: Script

    def __str__(self) -> str:
        return f"case {self.number}: {'; '.join(self.names)}  {self.script}"


PLAIN = ("plain", "nothing", "h = h", "from values")


class Deck:
    """The parts of a table in a drawn order, again and again."""

    def __init__(self, parts: Sequence[Any], draw: random.Random) -> None:
        self._plain, self._odd, self._draw = parts[0], list(parts[1:]), draw
        self._left: list[Any] = []

    def next(self, odds: float) -> Any:
        if self._draw.random() >= odds:
            return self._plain
        if not self._left:
            self._left = self._draw.sample(self._odd, len(self._odd))
        return self._left.pop()


def cases(seed: int) -> Iterator[Case]:
    """Cases without end."""
    draw = random.Random(seed)
    tables = {"mixer": MIXERS, "mlp": MLPS, "norm": NORMS, "start": STARTS, "memory": MEMORIES, "loop": LOOPS}
    tables |= {"shared": SHARED, "head": HEADS, "state": STATES}
    decks = {name: Deck(table, draw) for name, table in tables.items()}
    decks |= {"numbers": Deck(NUMBERS, draw), "call": Deck(CALLS, draw)}
    odds = {"mixer": 0.6, "mlp": 0.6, "norm": 0.4, "start": 0.5, "memory": 0.3, "loop": 0.35, "shared": 0.25}
    odds |= {"head": 0.6, "state": 0.3, "numbers": 0.8, "call": 0.35}
    for number in itertools.count():
        parts = {name: deck.next(odds[name]) for name, deck in decks.items()}
        script = draw_script(draw, parts)
        yield Case(number, odd_names(parts), write(parts, script, draw), script)


def odd_names(parts: dict[str, Any]) -> tuple[str, ...]:
    named = {name: part if isinstance(part, str) else part.name for name, part in parts.items()}
    return tuple(f"{name}: {one}" for name, one in named.items() if one not in PLAIN)


def draw_script(draw: random.Random, parts: dict[str, Any]) -> Script:
    mesh = draw_mesh(draw)
    loads = draw.choice(("all", "some", "buffers")) if draw.random() < 0.25 else ""
    return Script(
        mesh=mesh,
        dtype="float32" if draw.random() < 0.08 else "float64",
        accumulate=draw.choice((1, 1, 1, 2)),
        clip=draw.choice((0.0, 0.0, 0.3)),
        groups=draw.random() < 0.3,
        schedule=draw.random() < 0.3,
        zeros=draw.random() < 0.2,
        halve=draw.random() < 0.15,
        evaluate=draw.choice(((), (1,), (2,), (3,))),
        load=loads,
        reload=draw_mesh(draw) if draw.random() < 0.2 else {},
        lazy=draw.random() < 0.1,
        loss_fn=parts["head"].name in ("plain", "with bias", "capped") and draw.random() < 0.4,
    )


def draw_mesh(draw: random.Random) -> dict[str, Any]:
    t, p, d = draw.choice(DEGREES)
    mesh: dict[str, Any] = {"t": t, "p": p, "d": d, "num_microbatches": draw.choice((1, 2, 2, 4))}
    if p > 1:
        schedule = draw.choice(
            ("", "", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "looped_bfs", "zb_2p")
        )
        mesh |= {"schedule": schedule} if schedule else {}
        if schedule in ("interleaved", "zbv", "looped_bfs"):
            mesh |= {"v": 2 if p < 3 else 1} if schedule != "zbv" else {"v": 2}
        if schedule == "interleaved":
            mesh["num_microbatches"] = 2 * p
            mesh["v"] = 2
    if draw.random() < 0.5:
        mesh |= draw.choice(SWITCHES)
    return mesh


def pieces_of(mesh: dict[str, Any]) -> int:
    return int(mesh.get("d", 1) * mesh.get("num_microbatches", 1))


def write(parts: dict[str, Any], script: Script, draw: random.Random) -> str:
    """The complete source of a model and its data."""
    width, heads = draw.choice(SIZES)
    layers = draw.choice((4, 4, 3, 3, 6))
    length = draw.choice([n for n in (4, 6, 8, 16) if n >= layers])
    pieces = math.lcm(pieces_of(script.mesh), pieces_of(script.reload))
    rows = pieces * draw.choice((1, 1, 2, 3))
    vocab = draw.choice((24, 16, 11, width, 29))
    call: Call = parts["call"]
    head: Part = parts["head"]
    block = draw.choice(BLOCKS) if draw.random() < 0.5 else BLOCKS[0]
    norm: Part = parts["norm"]
    for at in ("1", "2"):
        block = block.replace(f"{{{at}}}", norm.use.replace("{n}", f"self.norm{at}"))
    state: Part = parts["state"]
    init = [
        parts["start"].init,
        state.init,
        parts["memory"].init,
        parts["loop"].init,
        head.init,
        parts["shared"].init,
    ]
    end = head.use
    passes = call.passes
    if script.loss_fn:
        end = "\n".join([*end.splitlines()[:-1], "return logits"])
        passes += ", targets=y"
    forward = [call.start, parts["start"].use, state.use, parts["memory"].use, parts["loop"].use, end]
    return SOURCE.format(
        sizes=(pieces, rows, length, width, heads, vocab, layers),
        mixer_init=indented(parts["mixer"].init),
        mixer=indented(parts["mixer"].use),
        mlp_init=indented(parts["mlp"].init),
        mlp=indented(parts["mlp"].use),
        norm_init=indented("\n".join(norm.init.replace("{n}", f"self.norm{at}") for at in "12")),
        block=indented(block.replace("{c}", parts["numbers"])),
        init=indented("\n".join(line for line in init if line)),
        takes=call.takes,
        forward=indented("\n".join(line for line in forward if line)),
        loss_fn=draw.choice(LOSS_FNS),
        passes=passes,
    )


def indented(lines: str) -> str:
    return textwrap.indent(lines, " " * 8)
