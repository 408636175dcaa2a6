"""Hostile cases with a seed: models of `recipes.py` on drawn meshes, each judged by the plain torch loop (`judge.py`).

    python -m tests.hostile --cases 300 --seed 7                  # counts, and what is wrong with its source
    python -m tests.hostile --only state --minutes 10
    python -m tests.hostile --show 17 --seed 7                    # the source of case 17

A case is a recipe, a mesh with its schedule, and what happens during training: an optimizer, evaluations, a load of another
variant's state, a move to another mesh. All families take turns, each through its recipes in a drawn order; no case is the
same as another. The same seed draws the same cases, however many are run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.hostile.judge import FORBIDDEN, Outcome, Script, judge
from tests.hostile.recipes import FAMILIES, METHODS, Recipe

HEADER = """\
import itertools, math, random, time
import numpy, torch
import torch.nn.functional as F
from torch import nn

B = PIECES = ROWS = {rows}
LENGTH, WIDTH, VOCAB = 6, 12, 20
COUNT = itertools.count()
torch.manual_seed(3)
"""
INIT = """\
super().__init__()
self.emb = nn.Embedding(VOCAB, WIDTH)
self.layers = nn.ModuleList(
    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(4)
)
self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
"""
FOOTER = """\
def make(variant):
    torch.manual_seed(variant)
    return Net(variant)


def packed(*args, **kwargs):
    return args, kwargs


def batch(step, rows):
    draw = torch.Generator().manual_seed(50 + step)
    x, y = (torch.randint(0, VOCAB, (rows, LENGTH), generator=draw) for _ in range(2))
    mask = (torch.rand(rows, LENGTH, generator=draw) < 0.7).double()
    values = torch.randn(rows, LENGTH, generator=draw)
    sign = torch.randint(0, 2, (rows,), generator=draw).double() * 2 - 1
    mask[:, 0], sign[0] = 1.0, 1.0
    return packed({call})
"""
MESHES: list[dict[str, Any]] = [
    {"t": 1, "p": 1, "d": 1, "num_microbatches": 1},
    {"t": 1, "p": 1, "d": 1, "num_microbatches": 4},
    {"t": 2, "p": 1, "d": 1, "num_microbatches": 1},
    {"t": 2, "p": 1, "d": 1, "num_microbatches": 2},
    {"t": 1, "p": 1, "d": 2, "num_microbatches": 1},
    {"t": 1, "p": 1, "d": 4, "num_microbatches": 1},
    {"t": 1, "p": 2, "d": 1, "num_microbatches": 2},
    {"t": 1, "p": 2, "d": 1, "num_microbatches": 8},
    {"t": 1, "p": 2, "d": 1, "v": 2, "num_microbatches": 4},
    {"t": 1, "p": 3, "d": 1, "num_microbatches": 4, "schedule": "zb_h1"},
    {"t": 2, "p": 2, "d": 1, "num_microbatches": 2},
    {"t": 2, "p": 2, "d": 1, "num_microbatches": 4, "schedule": "gpipe"},
    {"t": 3, "p": 1, "d": 2, "num_microbatches": 2, "sequence_parallel": True},
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 4, "schedule": "zbv", "v": 2},
    {"t": 2, "p": 1, "d": 2, "num_microbatches": 4, "sequence_parallel": "auto", "fuse": False},
    {
        "t": 2,
        "p": 2,
        "d": 1,
        "num_microbatches": 2,
        "p2p": "scatter_gather",
        "delay_wgrad_compute": "after_b",
    },
    {"t": 2, "p": 1, "d": 1, "num_microbatches": 2, "async_tensor_model_parallel_allreduce": True},
]
SMALL_MACHINE = {"latency": 1e-9, "per_saved_byte": 1e-12}  # sizes decide, as in the tests
STATEFUL = (
    "state",
    "ranks",
)  # of these what Python holds is not moved to another mesh, and they take more steps


@dataclass(frozen=True)
class Case:
    number: int
    recipe: Recipe
    rows: int
    script: Script

    def __str__(self) -> str:
        script = replace(self.script, meddles=("", ""))  # they are in the name
        return f"case {self.number}: {self.recipe.family}: {self.recipe.name}  {script}"

    @property
    def kind(self) -> str:
        return self.recipe.family

    @property
    def source(self) -> str:
        return write(self.recipe, self.rows)


def write(recipe: Recipe, rows: int) -> str:
    """The complete source of a model and its data."""
    methods = METHODS if recipe.family == "state" else ()
    top = [line for one in recipe.top for line in one.splitlines()]
    init = [*INIT.splitlines(), *recipe.init]
    loop = ["for i, layer in enumerate(self.layers):", *_indent(recipe.loop)]
    forward = [*recipe.start, *loop, *recipe.end, "logits = self.head(self.norm(h))", f"return {recipe.loss}"]
    body = ["def __init__(self, variant):", *_indent(init), "", *methods, *([""] if methods else [])]
    body += [f"def forward(self, {recipe.takes}):", *_indent(forward)]
    text = [HEADER.format(rows=rows), *top, "", "class Net(nn.Module):", *_indent(body), "", ""]
    return "\n".join([*text, FOOTER.replace("{call}", recipe.call)])


def _indent(lines: Any) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def cases(seed: int, only: str = "") -> Iterator[Case]:
    """All cases of a seed, without end but that of the recipes times the meshes."""
    draw = random.Random(seed)
    queues = {name: _queue(name, draw.randrange(10**9)) for name in FAMILIES}
    picks = {name: queue for name, queue in queues.items() if not only or name == only}
    seen: set[str] = set()
    numbers = itertools.count()
    while picks:
        for name, queue in list(picks.items()):
            found = next(queue, None)
            if found is None:
                del picks[name]
                continue
            recipe, rows, script = found
            if (key := f"{write(recipe, rows)}{script}") not in seen:
                seen.add(key)
                yield Case(next(numbers), recipe, rows, script)


def _queue(family: str, seed: int) -> Iterator[tuple[Recipe, int, Script]]:
    """The recipes of a family in a drawn order, as often as there are meshes, each time on another one."""
    draw = random.Random(seed)
    recipes = list(FAMILIES[family]())
    draw.shuffle(recipes)
    offsets = [draw.randrange(len(MESHES)) for _ in recipes]
    for turn in range(len(MESHES)):
        for recipe, offset in zip(recipes, offsets, strict=True):
            mesh = dict(MESHES[(offset + 5 * turn) % len(MESHES)])
            yield _drawn(recipe, mesh, draw)


def _drawn(recipe: Recipe, mesh: dict[str, Any], draw: random.Random) -> tuple[Recipe, int, Script]:
    is_forbidden = recipe.meddles[1] == FORBIDDEN
    if is_forbidden:
        mesh["d"] = max(2, mesh["d"])  # so that there are copies, which do not stay equal
    if draw.random() < 0.5:
        mesh["machine"] = SMALL_MACHINE
    pieces = mesh["d"] * mesh["num_microbatches"]
    rows = pieces * draw.choice((1, 2, 2, 3) if pieces < 8 else (1, 2))
    is_stateful = recipe.family in STATEFUL
    other = (
        {"t": 1, "p": 2, "d": 1, "num_microbatches": 1}
        if mesh["t"] > 1
        else {"t": 2, "p": 1, "d": 1, "num_microbatches": 1}
    )
    script = Script(
        mesh=mesh,
        steps=120 if is_forbidden else 12 if is_stateful else 4,
        optimizer=draw.choice(("SGD", "AdamW")),
        evaluate=(1,) if recipe.family != "ranks" and draw.random() < 0.4 else (),
        reload=other if not is_stateful and draw.random() < 0.2 else {},
        load="variant" if recipe.loads else "",
        meddles=recipe.meddles,
    )
    return recipe, rows, script


def run(case: Case) -> Outcome:
    """Judge a case with its ranks as threads."""
    return judge(case.source, case.script)
