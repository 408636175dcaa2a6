"""examples/train.py as one of torchrun's processes, which writes down when it has come how far: for benchmarks/restart.py.

In: a folder, then the arguments of the script. Out: `<attempt>-<rank>.jsonl` in the folder, a line per mark: what, and when.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything is imported that takes time.
BEGUN = time.time()


def started_at() -> float:
    """Return when this process was made, as far as the system tells."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return BEGUN
    # Field 22, counted behind the name, which may have spaces.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


class Marks:
    """A file with a line for each mark."""

    def __init__(self, folder: Path) -> None:
        name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}.jsonl"
        self._file = (folder / name).open("a", buffering=1)

    def add(self, what: str, at: float | None = None, **facts: Any) -> None:
        line = {"what": what, "at": time.time() if at is None else at, "pid": os.getpid(), **facts}
        self._file.write(json.dumps(line) + "\n")

    def around(self, owner: Any, name: str, what: str) -> None:
        """Mark the beginning and the end of each call of a function."""
        right: Callable[..., Any] = getattr(owner, name)

        def marked(*args: Any, **keywords: Any) -> Any:
            self.add(f"{what} begins")
            result = right(*args, **keywords)
            self.add(f"{what} ends")
            return result

        setattr(owner, name, marked)


def main(folder: Path, arguments: list[str]) -> None:
    marks = Marks(folder)
    marks.add("made", started_at())
    import torch.distributed

    import autoptd
    from autoptd.model.checkpointer import Checkpointer

    marks.around(torch.distributed, "init_process_group", "group")
    # Asking for it imports the compiler.
    marks.around(autoptd, "parallelize", "parallelize")
    marks.add("imported")
    marks.around(Checkpointer, "resume", "resume")
    right = Checkpointer.step

    def step(self: Checkpointer, *args: Any) -> bool:
        marks.add("step", step=self._pm.steps)
        return right(self, *args)

    Checkpointer.step = step  # type: ignore[method-assign]
    script = Path(__file__).parents[2] / "examples" / "train.py"
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        # Behind what the run says of the fault, and the end of its checkpointer.
        marks.add("failed")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
