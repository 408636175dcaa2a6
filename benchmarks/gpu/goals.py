"""What this project aims at on one H100 or H200, beside what was found: reported, never judged.

In: the folder of results. Out: rows (goal, aim, found), "not run" where its row is not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu import again as again_rows
from benchmarks.gpu.rows import Found, Journal

FUSED, COMPILED = "ours, fused", "torch.compile"
RATIO, SHARE, MEMORY = (
    "its time over that of ours, fused",
    "share of the GEMM ceiling",
    "predicted over measured",
)
FASTER, BUSY, NEAR, WORTH = 1.05, 0.60, 0.03, 1.03
STAGE = "GPT-3 175B, a middle stage's rank at t=8 p=8"


def goals(folder: Path) -> list[list[str]]:
    fast = {row["name"]: row for row in Journal.open(folder, "fast").rows}
    kernels = Journal.open(folder, "kernels").rows
    rows = []
    for model in ("nanoGPT 124M", "Llama 1.34B"):
        ratio = _of(fast.get(model), COMPILED, RATIO)
        rows.append([f"{model}: torch.compile's time over ours", f">= {FASTER}", _interval_text(ratio)])
    for model in ("Llama 1.34B", STAGE):
        share = _of(fast.get(model), FUSED, SHARE)
        rows.append(
            [f"{model}: share of the GEMM ceiling", f">= {BUSY:.0%}", f"{share:.1%}" if share else "not run"]
        )
    for model in fast:
        memory = _of(fast[model], FUSED, MEMORY) or _of(fast[model], again_rows.FULL, MEMORY)
        if memory:
            rows.append([f"{model}: predicted over measured memory", f"1 +- {NEAR}", f"{memory:.3f}"])
    again = fast.get("GPT 1.3B, computed again")
    # Theirs over ours: at least 1 / 0.93 without early stop.
    for theirs, aim in ((again_rows.WHOLE, ">= 1.075"), (again_rows.THEIRS, ">= 1.0")):
        ratio = _of(again, theirs, f"its time over that of {again_rows.FULL}")
        rows.append([f"full recomputation: time of {theirs} over ours", aim, _interval_text(ratio)])
    compared = [
        row
        for row in kernels
        if row["name"].endswith(", with torch.compile") and len(row.get("forms", ())) == 3
    ]
    tried = {row["name"].removesuffix(", with torch.compile"): row["wins"] for row in compared}
    worthless = [f"{name} ({wins:.2f})" for name, wins in tried.items() if wins < WORTH]
    found = (", ".join(worthless) or "none") if tried else "not run"
    rows.append(
        [f"fused operators that win less than {WORTH} beside eager and torch.compile", "off there", found]
    )
    return rows


def _interval_text(ratio: Any) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else "not run"


def _of(row: Found | None, form: str, key: str) -> Any:
    """An entry of a form's row; None where there is none."""
    found = [one for one in (row or {}).get("forms", ()) if one["form"] == form]
    return found[0].get(key) if found else None
