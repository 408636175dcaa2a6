"""Which losses train alike on every mesh: each of 24 on four meshes against one device, and the bytes it moves over tp.

A cell is right (`autoptd.verify` in float64, 1e-9), refused with its remedy, or WRONG. Beside it, the bytes that the loss moves
over tp in a microbatch, of the program's own record, and what a gather of its logits would take.

    python -m benchmarks.losses                 # writes benchmarks/results/losses.json
    python -m benchmarks.losses --only masked_mean zloss
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.errors import AutoptdError, InternalError, RuntimeFault
from autoptd.ir.machine import Machine
from benchmarks.lib.loss_cases import CASES, LENGTH, Case
from benchmarks.lib.report import RESULTS, save

MESHES: dict[str, dict[str, int]] = {
    "m=4": {"num_microbatches": 4},
    "d=2": {"d": 2},
    "t=2": {"t": 2},
    "t=2 p=2 d=2 m=2": {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
}
# A rank for which collectives cost what their bytes do, as they do where values are large: a toy would gather its logits.
MACHINE = Machine(latency=1e-9, redundant=150e-6)
# 512 tokens of a large vocabulary, in one microbatch: what the bytes of the table are of.
LARGE_ROWS, LARGE_VOCAB, LARGE_WIDTH = 64, 32768, 512
BYTES_AT = {"t": 2, "num_microbatches": 1}
# Collectives of the decoder, and the sum of a head's input gradient, are no part of a loss.
DECODER, HEADS = "decoder", ("lm_head", "heads")
FLOAT = 4
KINDS = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}


def cell(case: Case, mesh: dict[str, int]) -> dict[str, Any]:
    """What becomes of a loss on a mesh."""
    try:
        report = autoptd.verify(case.make(), example_inputs=case.call(), steps=3, machine=MACHINE, **mesh)
    except (InternalError, RuntimeFault) as error:
        return {"is": "WRONG", "fact": str(error).splitlines()[0][:300]}
    except AutoptdError as error:
        return {"is": "refused", "fact": error.fact, "remedy": error.remedy}
    # The model's own step in float32 is compared as well, at float32's rounding.
    exact = [difference.size for difference in report.differences if difference.what != "own dtype"]
    return {"is": "right", "largest": max(exact)}


def loss_bytes(case: Case) -> dict[str, int] | None:
    """Bytes over tp of everything behind the decoder, in a microbatch of all rows; None where t=2 is refused."""
    try:
        model, call = case.make(LARGE_VOCAB, LARGE_WIDTH), case.call(LARGE_ROWS, LARGE_VOCAB)
        program = autoptd.compile(model, example_inputs=call, **BYTES_AT)
    except AutoptdError:
        return None
    moved = 0
    for call in program.collectives:
        kinds = {call.forward, call.backward if not call.site.startswith(HEADS) else "none"} & KINDS
        if call.axis == "tp" and call.scope == "microbatch" and not call.site.startswith(DECODER):
            moved += call.payload_bytes * len(kinds)
    tokens = LARGE_ROWS * LENGTH
    return {"bytes": moved, "a token": moved / tokens, "logits a token": LARGE_VOCAB * FLOAT}


def main() -> None:
    """Fill the table, and print it line by line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in asked.only:
        cells = {mesh: cell(CASES[name], degrees) for mesh, degrees in MESHES.items()}
        row = {"name": name, "about": CASES[name].about, "cells": cells, "tp": loss_bytes(CASES[name])}
        rows.append(row)
        print(name, *(one["is"] for one in cells.values()), row["tp"], flush=True)
        for fact in dict.fromkeys(
            f"{one['fact']} | {one.get('remedy')}" for one in cells.values() if "fact" in one
        ):
            print("   ", fact)
    every = [one["is"] for row in rows for one in row["cells"].values()]
    counts = {kind: every.count(kind) for kind in ("right", "refused", "WRONG")}
    print(counts)
    if set(asked.only) == set(CASES):
        save("losses", {"meshes": list(MESHES), "counts": counts, "rows": rows}, asked.out)


if __name__ == "__main__":
    main()
