"""Report a training run: loss, tokens/s, FLOP/s, gradient norm, memory, the shares of time, and slow ranks.

In: a `ParallelModel`, and the losses of its steps. Out: on rank 0, a line on stderr from time to time, a JSON object per
step in a file, and TensorBoard's scalars if its package is installed.

    with autoptd.Progress(pm, tokens=batch * length, steps=1000, log="run.jsonl") as progress:
        for x, y in loader:
            loss = progress.step(*pm.local_batch(x, y))         # pm.step; measured from time to time
            norm = pm.clip_grad_norm_(1.0)
            opt.step(); opt.zero_grad()
            progress.add(loss, norm)
    # step   20/1000  loss 2.914  norm 0.81  12.3 k tokens/s  1.20 TFLOP/s a rank (MFU 38.5%)  compute 71% ...

Model FLOPs are those of the matrix products of the model itself, three times its forward (no recomputation, nothing
that tensor ranks repeat); MFU is their share of the ranks' peak.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import torch

from autoptd.errors import PlanError
from autoptd.ir.machine import read_gpus
from autoptd.ir.mesh import Coordinate, Mesh
from autoptd.model.parallel_model import ParallelModel
from autoptd.model.run import is_local
from autoptd.runtime.measure.stepclock import StepTimes
from autoptd.wings.words import bytes_text, count_text

# A rank is slow if it computes for LIMIT times the median of the ranks with the same work, IN_A_ROW measured steps.
LIMIT, IN_A_ROW = 1.2, 3


class Progress:
    """The progress of one run: see the module's docstring.

    `tokens` of a step of all replicas; `steps` of the run, if known; `peak` FLOP/s of a rank (by default that of a known
    GPU for products in the parameters' dtype, else there is no MFU); every `measure_every` steps (0: never), `step`
    measures the shares of time of `pm.step`, without clipping and optimizer; `quiet` prints nothing. Every rank makes one
    and calls it in the same way: measured steps are collective.
    """

    def __init__(
        self,
        pm: ParallelModel,
        *,
        tokens: int,
        steps: int | None = None,
        log: str | Path | None = None,
        tensorboard: str | Path | None = None,
        peak: float | None = None,
        measure_every: int = 10,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.pm, self.tokens, self.steps, self.measure_every = pm, tokens, steps, measure_every
        self._peak = peak
        self.is_first = pm.coordinate == Coordinate()
        # Steps before this run, if it is resumed.
        self.first = pm.steps
        self.losses: list[float] = []
        # Seconds of every step, from the end of the previous one.
        self.seconds: list[float] = []
        # Times of each rank in the last measured step.
        self.times: tuple[StepTimes, ...] = ()
        self._slow = SlowRanks(pm.options.mesh)
        self._is_on_cpu = all(parameter.device.type == "cpu" for parameter in pm.parameters())
        self._steps_begun = 0
        self._is_measured = False
        self._stream = stream if stream is not None else sys.stderr
        self._is_quiet = quiet or not self.is_first
        # A terminal has one line that is overwritten, a file or a pipe gets new ones.
        self._is_live = self._stream.isatty()
        self._printed_at = 0.0
        self._log = _open(log, "a" if self.first else "w") if log is not None and self.is_first else None
        self._board = _board(tensorboard) if tensorboard is not None and self.is_first else None
        self._last = time.perf_counter()

    def __enter__(self) -> Progress:
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run `pm.step`, and measure it in its turn, beginning with the second step, which is warm."""
        self._steps_begun += 1
        self._is_measured = self.measure_every > 0 and (self._steps_begun - 2) % self.measure_every == 0
        if not self._is_measured:
            return self.pm.step(*args, **kwargs)
        loss, self.times = self.pm.measured_step(*args, **kwargs)
        # Ranks that share cores are slow when the system runs others.
        takes_turns = is_local(self.pm.options) or (self._is_on_cpu and share_cores(self.times))
        for text in () if takes_turns else self._slow.look(self.times):
            self._say(text)
        return loss

    def add(
        self, loss: torch.Tensor | float, grad_norm: torch.Tensor | float | None = None, **more: float
    ) -> None:
        """Record the end of a step including the optimizer; `more` are additional numbers for the log."""
        # Waits for the device, so that the next step is timed from the real end of this one.
        self.losses.append(float(loss))
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if not self.is_first:
            return
        record = self._record(self.seconds[-1], None if grad_norm is None else float(grad_norm))
        record |= {name: float(value) for name, value in more.items()}
        if self._log:
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
        if self._board:
            for name, value in record.items():
                # The largest of several ranks' numbers.
                scalar = max(value) if isinstance(value, list) else value
                if name != "step":
                    self._board.add_scalar(name, scalar, record["step"])
        self._print(record)

    def _record(self, seconds: float, grad_norm: float | None) -> dict[str, Any]:
        """Return the record of the last step, with the shares of time if it was measured."""
        flops = self.model_flops / seconds
        record: dict[str, Any] = {
            "step": self.first + len(self.losses),
            "loss": self.losses[-1],
            "seconds": seconds,
        }
        if grad_norm is not None:
            record["grad_norm"] = grad_norm
        record |= {"tokens_per_second": self.tokens / seconds, "model_flops_per_second": flops}
        if self.peak:
            record["mfu"] = flops / self.peak / self.pm.program.mesh.size
        if self._is_measured:
            # Shares of the time of all ranks.
            whole = sum(rank.seconds for rank in self.times)
            for name in ("compute", "communication", "waiting"):
                record[name] = sum(getattr(rank, name) for rank in self.times) / whole
            record["step_seconds"] = max(rank.seconds for rank in self.times)
            record["peak_bytes"] = self.peak_bytes
            record["state_bytes"] = self.state_bytes
        return record

    @property
    def peak(self) -> float | None:
        """Peak FLOP/s of a rank: the requested number, else that of the GPU, if it is known."""
        if self._peak is None:
            self._peak = peak_here(self.pm) or 0.0
        return self._peak or None

    @property
    def peak_bytes(self) -> list[int]:
        """Peak memory of every rank in the last measured step; one number for ranks that share a process."""
        peaks = [rank.peak_bytes for rank in self.times]
        return [max(peaks)] if peaks and is_local(self.pm.options) else peaks

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and AdamW's state on the fullest rank; of all ranks if they share a process."""
        program = self.pm.program
        if is_local(self.pm.options):
            return sum(program.memory(rank).total for rank in range(program.mesh.size))
        # Ranks of one pipeline rank hold the same, except for padding.
        firsts = {program.mesh.pipeline_rank_of(rank): rank for rank in reversed(range(program.mesh.size))}
        return max(program.memory(rank).total for rank in firsts.values())

    @property
    def model_flops(self) -> int:
        """FLOPs of a step's matrix products on all ranks: three times the model's forward, less for frozen weights."""
        return self.pm.program.model_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks in the median step, without the first one."""
        return self.tokens / statistics.median(self.seconds[1:] or self.seconds)

    def close(self) -> None:
        """End the line and the files."""
        if not self._is_quiet and self.losses:
            self._print(self._record(statistics.median(self.seconds[1:] or self.seconds), None), is_last=True)
        for output in (self._log, self._board):
            if output is not None:
                output.close()
        self._log = self._board = None

    def _say(self, text: str) -> None:
        """Print a line between progress lines."""
        if not self._is_quiet:
            self._stream.write(f"\r\x1b[K{text}\n" if self._is_live else f"{text}\n")
            self._stream.flush()

    def _print(self, record: dict[str, Any], is_last: bool = False) -> None:
        """Print a line: on a terminal one that is overwritten, else one every ten seconds."""
        now = time.perf_counter()
        is_due = now - self._printed_at >= (0.2 if self._is_live else 10.0)
        if self._is_quiet or not (is_due or is_last):
            return
        self._printed_at = now
        mesh = self.pm.program.mesh
        # Ranks as threads share the memory of one process.
        about_peak = " for all ranks" if mesh.size > 1 and is_local(self.pm.options) else ""
        if self.times:
            about_peak = f" (state {bytes_text(self.state_bytes)}){about_peak}"
        rest = "bubble and rest" if mesh.pipeline_ranks > 1 else "rest"
        text = progress_line(record, self.steps, mesh.size, self.times, rest, about_peak)
        self._stream.write(f"\r{text}\x1b[K" if self._is_live else f"{text}\n")
        if is_last and self._is_live:
            self._stream.write("\n")
        self._stream.flush()


def progress_line(
    record: dict[str, Any],
    steps: int | None,
    ranks: int,
    times: Sequence[StepTimes],
    rest: str = "rest",
    about_peak: str = "",
) -> str:
    """Format one line about a step; shares of time and memory are those of `times`, the last measured step.

    `rest` names the time that is neither compute nor exchange, `about_peak` is added to the peak memory.
    """
    count = f"{record['step']:>{len(str(steps))}}/{steps}" if steps else f"{record['step']}"
    parts = [f"step {count}", f"loss {record['loss']:.4f}"]
    if "grad_norm" in record:
        parts.append(f"norm {record['grad_norm']:.3g}")
    parts.append(f"{count_text(record['tokens_per_second'])} tokens/s")
    mfu = f" (MFU {record['mfu']:.1%})" if "mfu" in record else ""
    parts.append(f"{count_text(record['model_flops_per_second'] / ranks, 'FLOP/s')} a rank{mfu}")
    if times:
        whole = sum(rank.seconds for rank in times)
        names = {"compute": "compute", "communication": "exchange", "waiting": rest}
        for name, word in names.items():
            seconds = sum(getattr(rank, name) for rank in times)
            parts.append(f"{word} {seconds / whole:.0%}")
        parts.append(f"peak {bytes_text(max(rank.peak_bytes for rank in times))}{about_peak}")
    return "  ".join(parts)


def known_peak(device: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a GPU by its name, for products in a dtype; None if unknown.

    float32 products are "tf32" if torch is configured to use it (`torch.set_float32_matmul_precision`).
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device))
    named = [gpu for gpu in read_gpus().values() if words.issuperset(gpu["device"].split())]
    # A MIG slice is a part of a GPU.
    if "MIG" in words or not named:
        return None
    # "H100 NVL" has precedence over "H100".
    gpu = max(named, key=lambda gpu: len(gpu["device"].split()))
    half = gpu["matrix_flops"]
    peaks = {"float16": half, "bfloat16": half if gpu.get("bf16", True) else None}
    peaks |= {"tf32": gpu.get("tf32_flops"), "float32": gpu.get("float32_flops")}
    return peaks.get(dtype)


def peak_here(pm: ParallelModel) -> float | None:
    """Return the peak FLOP/s of the model's GPU in the dtype of most of its parameters; None if it is not known."""
    devices = {parameter.device for parameter in pm.parameters() if parameter.is_cuda}
    if not devices:
        return None
    # A model may keep a few parameters (norms) in another dtype.
    sizes = Counter[str]()
    for spec in pm.program.params:
        sizes[spec.use.dtype] += math.prod(spec.shape)
    dtype = sizes.most_common(1)[0][0]
    if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = "tf32"
    return known_peak(torch.cuda.get_device_name(devices.pop()), dtype)


def _open(path: str | Path, mode: str) -> TextIO:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open(mode)  # type: ignore[return-value]
    except OSError as error:
        raise PlanError(f"log={str(path)!r}", f"cannot be written: {error}", "another path") from error


def _board(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        site = f"tensorboard={str(folder)!r}"
        raise PlanError(site, "the package tensorboard is missing", "pip install tensorboard") from error
    return SummaryWriter(str(folder))


class SlowRanks:
    """Counts how often in a row each rank computed for longer than those with the same work: a GPU that is too hot, a
    busy host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: Counter[int] = Counter()

    def look(self, times: Sequence[StepTimes]) -> list[str]:
        """Return a sentence about each rank that has become slow with another measured step."""
        # Only ranks of one pipeline rank have the same work.
        alike: dict[int, list[StepTimes]] = {}
        for rank in times:
            alike.setdefault(self._mesh.pipeline_rank_of(rank.rank), []).append(rank)
        texts = []
        for ranks in alike.values():
            usual = statistics.median_low(rank.compute for rank in ranks)
            for rank in ranks:
                is_slow = len(ranks) > 1 and rank.compute > LIMIT * usual
                self._counts[rank.rank] = self._counts[rank.rank] + 1 if is_slow else 0
                if self._counts[rank.rank] == IN_A_ROW:
                    texts.append(_sentence(rank, ranks, usual))
        return texts


def share_cores(times: Sequence[StepTimes]) -> bool:
    """Tell whether ranks on CPUs have fewer cores than threads, assuming the cores of this process on every host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(Counter(rank.host for rank in times).values())
    # A rank has an additional thread that sends and receives.
    return most * (torch.get_num_threads() + 1) > cores


def _sentence(slow: StepTimes, ranks: Sequence[StepTimes], usual: float) -> str:
    others = ", ".join(str(rank.rank) for rank in ranks if rank is not slow)
    how = f"in {IN_A_ROW} measured steps in a row it computed for over {LIMIT} times the median of ranks with the same work"
    now = f"now {slow.compute:.3g} s, median {usual:.3g} s; the others are {others}"
    return f"rank {slow.rank} on {slow.host} is slow: {how} ({now})"
