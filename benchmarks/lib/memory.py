"""Peak memory of a call on this rank: what is allocated beyond what was there before, counted allocation by allocation.

    peak_bytes(lambda: pm.step(ids, targets))

On CPUs from the memory events of torch's profiler, of the calling thread and those that autograd uses; on CUDA from the
allocator's own maximum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that were allocated at once during `run()`, beyond those before it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    # No public accessor has the events one by one: `prof.events()` adds them up per operator.
    events = [one for one in prof.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for one in sorted(events, key=lambda one: one.start_ns()):
        now += one.nbytes()
        peak = max(peak, now)
    return peak
