"""What a person sees of a training run: loss, tokens/s, FLOP/s, gradient norm, memory, where time goes. Rank 0 speaks alone.

In: a `ParallelModel`, and the losses of its steps. Out: a line on stderr from time to time, a JSON object per step in a file,
TensorBoard's scalars where its package is installed.

    with autoptd.Progress(pm, tokens=batch * length, steps=1000, log="run.jsonl") as progress:
        for x, y in loader:
            loss = progress.step(*pm.local_batch(x, y))         # pm.step; measured from time to time
            norm = pm.clip_grad_norm_(1.0)
            opt.step(); opt.zero_grad()
            progress.add(loss, norm)
    # step   20/1000  loss 2.914  norm 0.81  12.3 k tokens/s  1.20 TFLOP/s a rank (MFU 38.5%)  compute 71% ...

Model FLOPs are those of the matrix products of the model itself, three times its forward (no recomputation, nothing that
tensor ranks repeat); MFU is their share of the ranks' peak.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.parallel_model import ParallelModel
from autoptd.runtime.stepclock import StepTimes
from autoptd.viz.words import bytes_text, count_text

PEAKS = {  # part of a device's name -> FLOP/s of dense bf16 (fp16 where there is none) products, by the vendor's data sheet
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
}


class Progress:
    """The progress of one run: see the module's docstring.

    `tokens` of a step, all replicas together; `steps` of the run, if known; `peak` FLOP/s of a rank (left out: that of a
    known GPU, else there is no MFU); `measure_every` so many steps `step` measures where time goes (0: never); `quiet` prints
    nothing. Every rank makes one and calls it alike: measured steps are collective.
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
        self.peak = peak if peak is not None else known_peak()
        self.is_first = pm.coordinate == Coordinate(0, 0, 0)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # of every step, from the end of the one before
        self.times: tuple[StepTimes, ...] = ()  # of the last step that was measured
        self._steps_begun = 0
        self._is_measured = False
        self._stream = stream if stream is not None else sys.stderr
        self._is_quiet = quiet or not self.is_first
        self._is_live = self._stream.isatty()
        self._told_at = 0.0
        self._log = _open(log) if log is not None and self.is_first else None
        self._board = _board(tensorboard) if tensorboard is not None and self.is_first else None
        self._last = time.perf_counter()

    def __enter__(self) -> Progress:
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`pm.step`, measured where its turn has come: the first time at the second step, which is warm."""
        self._steps_begun += 1
        self._is_measured = self.measure_every > 0 and (self._steps_begun - 2) % self.measure_every == 0
        if not self._is_measured:
            return self.pm.step(*args, **kwargs)
        loss, self.times = self.pm.measured_step(*args, **kwargs)
        return loss

    def add(self, loss: torch.Tensor | float, grad_norm: torch.Tensor | float | None = None, **more: float) -> None:
        """Note that a step is over, optimizer included; `more` are numbers of your own, for the log."""
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
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, record["step"])
        self._tell(record)

    def _record(self, seconds: float, grad_norm: float | None) -> dict[str, Any]:
        """What is logged of the last step; the shares of time only where it was measured."""
        flops = self.model_flops / seconds
        record: dict[str, Any] = {"step": len(self.losses), "loss": self.losses[-1], "seconds": seconds}
        record |= {} if grad_norm is None else {"grad_norm": grad_norm}
        record |= {"tokens_per_second": self.tokens / seconds, "model_flops_per_second": flops}
        record |= {"mfu": flops / self.peak / self.pm.program.mesh.size} if self.peak else {}
        if self._is_measured:
            whole = sum(one.seconds for one in self.times)
            for name in ("compute", "communication", "waiting"):
                record[name] = sum(getattr(one, name) for one in self.times) / whole
            record["peak_bytes"] = [one.peak_bytes for one in self.times]
        return record

    @property
    def model_flops(self) -> int:
        """Matrix products of a step of all ranks: three times the model's forward."""
        program = self.pm.program
        return int(3 * program.costs.get("total_flops", 0) * program.num_microbatches * program.mesh.d)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, by the median step; the first one, which warms up, does not count."""
        return self.tokens / statistics.median(self.seconds[1:] or self.seconds)

    def close(self) -> None:
        """End the line and the files."""
        if not self._is_quiet and self.losses:
            self._tell(self._record(statistics.median(self.seconds[1:] or self.seconds), None), is_last=True)
        for one in (self._log, self._board):
            if one is not None:
                one.close()
        self._log = self._board = None

    def _tell(self, record: dict[str, Any], is_last: bool = False) -> None:
        """A line that is written over at a terminal, else one every ten seconds."""
        now = time.perf_counter()
        is_due = now - self._told_at >= (0.2 if self._is_live else 10.0)
        if self._is_quiet or not (is_due or is_last):
            return
        self._told_at = now
        text = progress_line(record, self.steps, self.pm.program.mesh.size, self.times)
        self._stream.write(f"\r{text}\x1b[K" if self._is_live else f"{text}\n")
        if is_last and self._is_live:
            self._stream.write("\n")
        self._stream.flush()


def progress_line(record: dict[str, Any], steps: int | None, ranks: int, times: Sequence[StepTimes]) -> str:
    """One line about a step; where time goes and memory are those of `times`, the last step that was measured."""
    count = f"{record['step']:>{len(str(steps))}}/{steps}" if steps else f"{record['step']}"
    parts = [f"step {count}", f"loss {record['loss']:.4f}"]
    if "grad_norm" in record:
        parts.append(f"norm {record['grad_norm']:.3g}")
    parts.append(f"{count_text(record['tokens_per_second'])} tokens/s")
    mfu = f" (MFU {record['mfu']:.1%})" if "mfu" in record else ""
    parts.append(f"{count_text(record['model_flops_per_second'] / ranks)}FLOP/s a rank{mfu}")
    if times:
        whole = sum(one.seconds for one in times)
        names = {"compute": "compute", "communication": "exchange", "waiting": "wait"}
        parts += [f"{word} {sum(getattr(one, name) for one in times) / whole:.0%}" for name, word in names.items()]
        parts.append(f"peak {bytes_text(max(one.peak_bytes for one in times))}")
    return "  ".join(parts)


def known_peak() -> float | None:
    """Peak FLOP/s of this machine's GPU, if it is one of `PEAKS`."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if all(word in name for word in part.split())), None)


def _open(path: str | Path) -> TextIO:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open("w")
    except OSError as error:
        raise PlanError(f"log={str(path)!r}", f"cannot be written: {error}", "another path") from error


def _board(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PlanError(f"tensorboard={str(folder)!r}", "the package is missing", "pip install tensorboard") from error
    return SummaryWriter(str(folder))


__all__ = ["PEAKS", "Progress", "known_peak", "progress_line"]
