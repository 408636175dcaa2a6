"""Cases with a seed: a kind, one or more of its parts, a mesh, and what the script does.

    python -m tests.hostile.second --cases 400 --seed 5
    python -m tests.hostile.second --only buffers --show 17

Each kind goes through its table in a drawn order, so that all parts come up equally often; kinds take turns.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.hostile.judge import Outcome, Script, judge
from tests.hostile.second.kinds_buffers import BUFFERS
from tests.hostile.second.kinds_loops import LOOPS, judge_loop
from tests.hostile.second.kinds_losses import EVALS, LABELS, NAMES
from tests.hostile.second.kinds_optimizers import OPTIMIZERS, PARAMS
from tests.hostile.second.kinds_precision import PRECISION, judge_precision
from tests.hostile.second.kinds_state import OUTSIDE_STATE, STATE
from tests.hostile.second.kinds_ties import TIES, judge_tie
from tests.hostile.second.source import Part, write

TABLES: dict[str, Sequence[Any]] = {
    "buffers": BUFFERS,
    "optimizers": OPTIMIZERS,
    "state": STATE,
    "outside": OUTSIDE_STATE,
    "precision": PRECISION,
    "loops": LOOPS,
    "labels": LABELS,
    "evals": EVALS,
    "params": PARAMS,
    "names": NAMES,
    "ties": TIES,
}
DEGREES = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
    (4, 1, 1),
    (1, 1, 4),
]
ROWS = 8
SIZES = (8, 4, 8, 12, 2)  # rows, tokens, width, vocabulary, layers


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    name: str
    source: str
    what: Any  # the Script; for loops and ties the entry of the table
    mesh: dict[str, Any]

    def __str__(self) -> str:
        how = self.what if isinstance(self.what, Script) else self.mesh
        return f"{self.kind} {self.number}: {self.name}  {how}"

    def run(self) -> Outcome:
        if self.kind == "loops":
            with tempfile.TemporaryDirectory() as folder:
                return judge_loop(self.what, self.mesh, folder)
        if self.kind == "ties":
            return judge_tie(self.what, self.mesh)
        if self.kind == "precision":
            return judge_precision(self.source, self.mesh)
        return judge(self.source, self.what)


def cases(seed: int, only: str = "") -> Iterator[Case]:
    """Cases without end; those of a kind are the same alone and among others."""
    kinds = [only] if only else list(TABLES)
    streams = {kind: cases_of(kind, seed) for kind in kinds}
    for kind in itertools.cycle(kinds):
        yield next(streams[kind])


def cases_of(kind: str, seed: int) -> Iterator[Case]:
    draw, table = random.Random(f"{seed} {kind}"), TABLES[kind]
    number = 0
    while True:
        for part in draw.sample(list(table), len(table)):
            yield draw_case(number, kind, part, draw)
            number += 1


def draw_case(number: int, kind: str, part: Any, draw: random.Random) -> Case:
    mixes = draw.random() < 0.4
    mesh = draw_mesh(draw, kind, mixes)
    if kind in ("loops", "ties"):
        return Case(number, kind, part.name, getattr(part, "body", ""), part, mesh)
    parts = [part]
    if kind == "buffers" and draw.random() < 0.25:
        other = draw.choice([one for one in BUFFERS if one is not part and not one.loss])
        parts = [part, other] if not set(names_of(part)) & set(names_of(other)) else parts
    if kind == "precision":
        mesh |= {"precision": draw.choice(("bf16", "bf16", "fp16"))}
        mesh |= {"loss_scale": 1.0} if mesh["precision"] == "fp16" else {}
        return Case(number, kind, part.name, write(parts, (8, 4, 16, 12, 2), mixes=mixes), None, mesh)
    script = draw_script(draw, kind, mesh, mixes)
    script = replace(script, **part.play)
    sizes = (ROWS, 4, *draw.choice(((8, 12), (8, 8), (16, 12))), draw.choice((2, 2, 3)))
    name = " + ".join(one.name for one in parts)
    return Case(number, kind, name, write(parts, sizes, mixes=mixes), script, mesh)


def names_of(part: Part) -> list[str]:
    return [slot for slot in ("init", "layer_init", "top") if getattr(part, slot)]


def draw_mesh(draw: random.Random, kind: str, mixes: bool) -> dict[str, Any]:
    t, p, d = draw.choice(DEGREES)
    if kind in ("state", "outside"):
        t, p, d = draw.choice(DEGREES[:4])
    mesh: dict[str, Any] = {"t": t, "p": p, "d": d}
    if (
        mixes
        and kind in ("buffers", "labels", "evals", "optimizers")
        and t * p * d < 4
        and draw.random() < 0.3
    ):
        mesh["c"] = 2
    m = draw.choice((1, 1, 2, 2, 4))
    if p > 1 and draw.random() < 0.4:
        mesh["schedule"] = draw.choice(("gpipe", "1f1b", "interleaved", "zb_h1", "zbv"))
        mesh |= {"v": 2} if mesh["schedule"] in ("interleaved", "zbv") else {}
        m = max(m, 2) if mesh["schedule"] == "interleaved" else m
    if draw.random() < 0.9:
        mesh["num_microbatches"] = min(m, ROWS // d)
    if (
        kind in ("optimizers", "params", "buffers", "evals")
        and d * mesh.get("c", 1) > 1
        and draw.random() < 0.6
    ):
        mesh["zero"] = 1
        mesh |= {"dp_shard": 2} if d == 4 and draw.random() < 0.5 else {}
    if kind not in ("state", "outside", "precision", "loops") and draw.random() < 0.2:
        mesh["recompute"] = draw.choice(("full", "selective", "auto"))
    if t > 1 and draw.random() < 0.2:
        mesh["sequence_parallel"] = draw.choice((True, "auto"))
    return mesh


def draw_script(draw: random.Random, kind: str, mesh: dict[str, Any], mixes: bool) -> Script:
    evaluate: tuple[int, ...] = ()
    if kind == "evals":
        evaluate = tuple(draw.sample(range(1, ROWS + 1), 3))
        if draw.random() < 0.5:
            d = mesh["d"]
            evaluate = tuple(d * draw.randint(1, ROWS // d) for _ in range(3))
    elif kind in ("buffers", "optimizers", "labels") and draw.random() < 0.3:
        evaluate = (ROWS,)
    reload = {}
    if kind in ("buffers", "optimizers", "params") and draw.random() < 0.35:
        reload = draw_mesh(draw, kind, mixes)
    accumulate = 2 if kind in ("buffers", "labels") and draw.random() < 0.2 else 1
    clip = 0.3 if kind not in ("state", "outside") and draw.random() < 0.2 else 0.0
    steps = 4 if reload else 3
    # Of which some ask for nothing else between an update and the evaluation.
    losses_only = kind == "evals" and draw.random() < 0.5
    return Script(
        mesh=mesh,
        steps=steps,
        accumulate=accumulate,
        evaluate=evaluate,
        often=True,
        reload=reload,
        by_folder=draw.random() < 0.5,
        clip=clip,
        losses_only=losses_only,
    )
