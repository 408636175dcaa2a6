"""What a benchmark leaves behind: a JSON file that says on what machine it ran, and a picture beside it.

save("peers", {"rows": rows}); save_picture("peers", figure)      # benchmarks/results/peers.json, peers.svg
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # half of what many a process would take to start
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, versions, and the load of the last minutes: above 0.3 at the start, others were at work too."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load at start": round(LOAD, 2),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found | {"python": platform.python_version(), "torch": torch.__version__}


def save(name: str, content: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write `content` and the machine to NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": machine()} | content, indent=1) + "\n")


def save_picture(name: str, figure: Figure, folder: Path = RESULTS) -> None:
    """Write NAME.svg, the same bytes for the same numbers."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def ratio_bars(axes: Axes, bars: list[tuple[str, float, float, float]], label: str) -> None:
    """Bars (text, median, low, high) from top to bottom, with their intervals; the line at 1 is parity."""
    middles = [one[1] for one in bars]
    errors = [[one[1] - one[2] for one in bars], [one[3] - one[1] for one in bars]]
    axes.barh([one[0] for one in bars], middles, xerr=errors, color="#7aa6d6", ecolor="#203a5c", capsize=2)
    for i, (_, middle, _, high) in enumerate(bars):
        axes.text(max(high, middle) + 0.02, i, f"{middle:.2f}", va="center", fontsize=8)
    axes.margins(x=0.12, y=0.01)  # room for the numbers
    axes.axvline(1, color="#b00020", linestyle="--", linewidth=1)
    axes.set_xlabel(label)
    if not axes.yaxis_inverted():  # by another that shares the axis
        axes.invert_yaxis()


def _processor() -> str:
    """The model's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


LOAD = os.getloadavg()[0]  # as the benchmark begins
