"""`--profile NAME`: three steps of one model under torch's profiler: a Chrome trace, and the top kernels as a table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.fast import FUSED, maker
from benchmarks.gpu.forms import of_rank
from benchmarks.gpu.models import GPT_175B, LLAMA_8B, SHAPES, Shape, batch, build, sized, toy
from benchmarks.gpu.rows import Found, Row, Setting

MESHES = {GPT_175B.name: {"t": 8, "p": 8}, LLAMA_8B.name: {"t": 8}}  # run as one rank
STEPS = 3


def traced(shape: Shape, setting: Setting) -> Iterator[Found]:
    if shape.name in MESHES:
        mesh = dict.fromkeys(MESHES[shape.name], 2) if setting.is_toy else MESHES[shape.name]
        size = toy(shape) if setting.is_toy else shape
        form, _ = of_rank(size, setting, mesh, 2, fuse="eager" if setting.is_toy else "triton")
    else:
        size = sized(shape, setting.is_toy)
        model = build(size, setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
        form = maker(model, batch(size, setting.where), setting.is_toy)(FUSED)
    for _ in range(2):
        form.step()
    setting.device.sync()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.device.is_cuda else [])]
    with profile(activities=activities) as prof:
        for _ in range(STEPS):
            form.step()
        setting.device.sync()
    path = setting.folder / f"trace_{shape.name.replace(' ', '_')}.json.gz"
    prof.export_chrome_trace(str(path))
    by = "self_cuda_time_total" if setting.device.is_cuda else "self_cpu_time_total"
    table = prof.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
    yield {"trace file": path.name, "steps": STEPS, "table": table}


def rows(name: str) -> list[Row]:
    return [Row(f"profile of {name}, ours, fused", partial(traced, SHAPES[name]), seconds=300)]
