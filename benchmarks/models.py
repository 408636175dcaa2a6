"""The ecosystem's models, unmodified: what of them is traced, compiled, equal, and how well it is partitioned.

Each family of `families.py` (packages as they are installed; a missing one is named) in a process of its own, with a limit of
time. Per model:

- traced, compiled (t=2, on the default machine), or the error;
- parity: `autoptd.verify` on every mesh, float64, 1e-9 of loss, gradients and updated parameters over two steps;
- operators without a row of the table of rules, inside of layers;
- the share of the FLOPs of matrix products that tp splits;
- collectives over tp that one more layer takes per microbatch, forward + backward: from models of four and of six layers, or of
  six and of eight;
- seconds of everything but tracing, over seconds of tracing (four layers; of the process, one thread).

    python benchmarks/models.py                     # benchmarks/results/models.json and the table in docs/models.md
    python benchmarks/models.py --only llama gpt2   # their rows alone; with --quick without parity, and nothing is written
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

MESHES: dict[str, dict[str, Any]] = {
    "t=2": {"t": 2},
    "p=2": {"p": 2},
    "d=2": {"d": 2, "num_microbatches": 2},
    "t=2 p=2": {"t": 2, "p": 2},
    "t=4": {"t": 4},
    "t=2 sp": {"t": 2, "sequence_parallel": True},
}
MICROBATCHES = 4  # of 2 rows, on every mesh: one trace serves them all
DEPTHS = (
    4,
    6,
    8,
)  # layers of the models whose plans are compared, of the first the seconds; parity is that of two
LIMIT = 600  # seconds for a family
RESULTS, DOC = ROOT / "benchmarks" / "results" / "models.json", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: benchmarks/models.py -->\n", "<!-- end of table -->\n"
PACKAGES = ("torch", "transformers", "x-transformers", "litgpt", "torchtitan")
Row = dict[str, Any]


def measure(name: str, *, quick: bool) -> Row:
    """The row of one family, measured in this process."""
    import torch

    import autoptd
    from autoptd import trace
    from autoptd.compat import load_compiler
    from benchmarks.families import families
    from tests import traces

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    load_compiler()
    family = families()[name]
    row: Row = {"name": name, "kind": family.kind, "about": family.about}
    torch.manual_seed(0)
    try:
        model = family.make().train()
    except Exception as error:
        return row | {"skipped": told(error)}
    call = {"example_inputs": family.call(), "loss_fn": family.loss_fn}
    try:
        keywords = {**call, **MESHES["t=2"], "num_microbatches": MICROBATCHES}
        first, *deeper = (families(layers)[name].make().train() for layers in DEPTHS)
        facts, calls = compile_timed(first, keywords)
        row |= facts
        for model_of_more in deeper:  # again, where the plan of the first layer changes with the depth
            fewer, calls = calls, calls_of(autoptd.compile(model_of_more, **keywords))
            row["collectives"] = per_layer(fewer, calls)
            if all(n == int(n) for both in row["collectives"].values() for n in both):
                break
    except Exception as error:
        row["failed"] = told(error)
    trace.capture = traces.capture
    row["parity"] = {}
    for mesh, degrees in {} if quick or "failed" in row else MESHES.items():
        try:
            report = autoptd.verify(model, **call, **{"num_microbatches": MICROBATCHES, **degrees}, steps=2)
            # In float64; a loss in the model's own dtype is held to what that rounds.
            row["parity"][mesh] = max(one.size for one in report.differences if one.what != "own dtype")
        except Exception as error:
            row["parity"][mesh] = told(error)
    return row


def compile_timed(model: Any, keywords: dict[str, Any]) -> tuple[Row, Counter[str]]:
    """Compile, and say what the program is like, and what it communicates over tp."""
    import autoptd
    from autoptd.trace.record import Recorder

    clock, record = [0.0], Recorder.record

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return record(*args, **kwargs)
        finally:
            clock[0] += time.process_time() - start

    start = time.process_time()
    Recorder.record = timed  # type: ignore[method-assign]
    try:
        program = autoptd.compile(model, **keywords)
    finally:
        Recorder.record = record  # type: ignore[method-assign]
    rest = time.process_time() - start - clock[0]
    costs = program.costs
    whole = Counter[str]()
    for one in costs.gemms:
        if one.redundant:
            whole[f"{one.operator.removeprefix('aten.')} in {one.module or 'the model'}"] += one.redundant
    facts = {
        "trace_s": round(clock[0], 2),
        "rest_s": round(rest, 2),
        "sharded": 1 - costs.redundant_gemm_flops / max(1, costs.total_flops),
        "whole": list(whole),
        "unlisted": [one for one in program.unlisted if is_in_layer(one.split(":")[0].split(" in ")[1])],
    }
    return facts, calls_of(program)


def is_in_layer(module: str) -> bool:
    return re.search(r"(^|\.)(\d+|\*)(\.|$)", module) is not None


def calls_of(program: Any) -> Counter[str]:
    """Collectives over tp of one microbatch, by kind and direction."""
    found = Counter[str]()
    for one in program.collectives:
        if one.axis == "tp" and one.scope == "microbatch":
            found[f"forward {one.forward}"] += 1
            found[f"backward {one.backward}"] += 1
    return found


def per_layer(few: Counter[str], many: Counter[str]) -> dict[str, list[float]]:
    """What one more layer adds, by kind: [forward, backward]."""
    found, more = {}, DEPTHS[1] - DEPTHS[0]  # all pairs are equally far apart
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        both = [(many[f"{way} {kind}"] - few[f"{way} {kind}"]) / more for way in ("forward", "backward")]
        if any(both):
            found[kind] = both
    return found


def told(error: Exception) -> str:
    """An error in a line: without remedy, and without the folders of this machine."""
    text = str(error).strip()
    if type(error).__name__ == "InternalError" and "DIFFERENT" in text:
        text = " ".join(text.splitlines()[1:4])
    text = re.sub(r"(/[\w.\-]+)+/(?=[\w.\-]+)", "", text.splitlines()[0] if text else "")
    return f"{type(error).__name__}: {text.split(' Remedy: ')[0]}"[:300]


def cells(row: Row) -> list[str]:
    """The row of the table."""
    head = [row["name"], row["about"]]
    if "skipped" in row or "failed" in row:
        return [*head, f"not {'made' if 'skipped' in row else 'compiled'}", *[""] * 5]
    parity = row["parity"]
    wrong = [mesh for mesh, found in parity.items() if isinstance(found, str)]
    equal = [found for found in parity.values() if not isinstance(found, str)]
    told = f"{len(equal)} of {len(parity)}" + (f", {max(equal):.0e}" if equal else "")
    calls = ", ".join(f"{a:g} + {b:g} {kind}" for kind, (a, b) in row["collectives"].items()) or "none"
    unlisted = len(row["unlisted"])
    split = f"{100 * row['sharded']:.1f} %"
    return [
        *head,
        "yes",
        told + (f"; not {', '.join(wrong)}" if wrong else ""),
        str(unlisted),
        split,
        calls,
        ratio(row),
    ]


def ratio(row: Row) -> str:
    return f"{row['rest_s'] / row['trace_s']:.2f}"


HEAD = (
    "model",
    "what it has",
    "compiled",
    "parity",
    "no rule",
    "GEMMs split",
    "collectives per layer",
    "compile / trace",
)


def table(rows: list[Row]) -> str:
    """The table and, below it, every failure with its reason."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    notes = [
        f"- {row['name']}: {row.get('skipped') or row['failed']}"
        for row in rows
        if {"skipped", "failed"} & row.keys()
    ]
    for row in rows:
        notes += [f"- {row['name']}: no rule for {one}" for one in row.get("unlisted", ())]
        notes += [f"- {row['name']}: {one} is whole on every rank" for one in row.get("whole", ())]
        wrong = {mesh: found for mesh, found in row.get("parity", {}).items() if isinstance(found, str)}
        for fact in dict.fromkeys(wrong.values()):
            notes.append(
                f"- {row['name']} with {', '.join(m for m, found in wrong.items() if found == fact)}: {fact}"
            )
    return "\n".join(lines) + "\n" + ("\nExceptions:\n\n" + "\n".join(notes) + "\n" if notes else "")


def write(rows: list[Row], *, are_all: bool) -> None:
    """Write the rows; where some are of a run before, the versions are those of both."""
    known = json.loads(RESULTS.read_text())["versions"] if RESULTS.exists() and not are_all else {}
    versions = {}
    for package in PACKAGES:
        try:
            now = version(package)
        except PackageNotFoundError:
            now = ""
        both = dict.fromkeys([*known.get(package, "").split(" and "), now])
        versions[package] = " and ".join(filter(None, both)) or "not installed"
    RESULTS.write_text(
        json.dumps({"versions": versions, "meshes": list(MESHES), "rows": rows}, indent=1) + "\n"
    )
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    made = ", ".join(f"{name} {number}" for name, number in versions.items())
    DOC.write_text(f"{before}{BEGIN}\n{table(rows)}\nMade with {made}.\n{END}{rest.split(END)[1]}")


def run(name: str, *, quick: bool) -> Row:
    """The row of one family, measured in a process of its own."""
    command = [sys.executable, __file__, "--here", name, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"name": name, "about": "", "failed": f"took more than {LIMIT} s"}
    if done.returncode:
        return {
            "name": name,
            "about": "",
            "failed": f"the process ended: {done.stderr.strip().splitlines()[-1]}",
        }
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these alone; the rows of the others stay")
    parser.add_argument("--quick", action="store_true", help="without parity; nothing is written")
    parser.add_argument("--jobs", type=int, default=1, help="models that are measured at a time")
    parser.add_argument("--here", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.here, quick=args.quick)))
        return
    from benchmarks.families import families

    found = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(partial(run, quick=args.quick), args.only or families()):
            print(" | ".join(cells(row)), row.get("failed", row.get("skipped", "")), flush=True)
            found[row["name"]] = row
            if not args.quick:
                write([found[name] for name in families() if name in found], are_all=not args.only)


if __name__ == "__main__":
    main()
