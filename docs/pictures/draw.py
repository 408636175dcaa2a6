"""Draw the pictures of this folder: GPT-2 (124 M parameters, on meta) at t=2, p=2, v=2. Needs transformers.

PYTHONPATH=. python docs/pictures/draw.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autoptd
from autoptd.wings.reports.pictures import simulated_run
from autoptd.wings.viz import schedule_svg

HERE = Path(__file__).parent


def pictures() -> dict[str, str]:
    """Return the text of each file."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        ids = torch.zeros(8, 128, dtype=torch.long)
    program = autoptd.compile(
        model, t=2, p=2, v=2, machine="a100", example_inputs={"input_ids": ids, "labels": ids}
    )
    title = f"GPT-2, {program.schedule_name}, p={program.mesh.p} v={program.v} m={program.num_microbatches}"
    return {
        "gpt2_layer.svg": program.graph("layer").svg or "",
        "gpt2_stages.svg": program.graph("model").svg or "",
        "gpt2_schedule.svg": schedule_svg([simulated_run(program)], program.orders, title=title),
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).write_text(text)
