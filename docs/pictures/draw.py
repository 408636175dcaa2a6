"""Draw the pictures of this folder: GPT-2 (124 M parameters, on meta) at t=2, p=2, v=2. Needs transformers.

PYTHONPATH=. python docs/pictures/draw.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autoptd
from autoptd.reports.pictures import simulated_run
from autoptd.viz import schedule_svg

HERE = Path(__file__).parent


def main() -> None:
    """Write gpt2_layer.svg, gpt2_stages.svg and gpt2_schedule.svg."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        ids = torch.zeros(8, 128, dtype=torch.long)
    program = autoptd.compile(
        model, t=2, p=2, v=2, machine="a100", example_inputs={"input_ids": ids, "labels": ids}
    )
    program.graph("layer").save(HERE / "gpt2_layer.svg")
    program.graph("model").save(HERE / "gpt2_stages.svg")
    title = f"GPT-2, {program.schedule_name}, p={program.mesh.p} v={program.v} m={program.num_microbatches}"
    (HERE / "gpt2_schedule.svg").write_text(
        schedule_svg([simulated_run(program)], program.orders, title=title)
    )


if __name__ == "__main__":
    main()
