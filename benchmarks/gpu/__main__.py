"""Everything that a GPU can show, in one command: section by section, in the order of value, until the time is up.

    python -m benchmarks.gpu --minutes 9 --out out/gpu        # make gpu
    python -m benchmarks.gpu --resume --out out/gpu           # go on where it stopped
    python -m benchmarks.gpu --sections right                 # only this one
    python -m benchmarks.gpu --profile "Llama 1.34B"          # a trace of it, and its kernels

Leaves a JSON file per section and gpu.md, of all that is known so far, in the folder. Installs nothing; needs torch, triton,
transformers, pytest and matplotlib. Without CUDA the same sections run at toy size, Triton's kernels in its interpreter: their
times mean nothing. The status is 0 if every check of section "right" held, 1 if not, 2 for a request that cannot be met; times
are reported, never judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.machine import about, others
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.report import write_report
from benchmarks.gpu.rows import NEAR_END, Journal
from benchmarks.gpu.sections import LOG, SECTIONS, How, Section, run_section, seconds_of, serve


def parse(words: list[str]) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=form
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default 9)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu"), help="the folder of results (default out/gpu)"
    )
    parser.add_argument(
        "--sections", nargs="+", choices=[one.name for one in SECTIONS], help="only these, in their order"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the folder has, and do the rest")
    parser.add_argument(
        "--require-cuda", action="store_true", help="end with status 2 where there is no CUDA device"
    )
    parser.add_argument(
        "--profile", metavar="NAME", choices=list(SHAPES), help=f"one of: {', '.join(SHAPES)}; nothing else"
    )
    parser.add_argument("--short", action="store_true", help="a few rows of each section")
    parser.add_argument("--toy", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    asked = parse(words)
    if asked.child:
        return serve(asked.child, asked.out, asked.end, How(asked.toy, asked.short))
    has_cuda = torch.cuda.is_available()
    if asked.require_cuda and not has_cuda:
        print("make gpu: --require-cuda: torch finds no CUDA device here", file=sys.stderr)
        return 2
    if not asked.minutes > 0:
        print(f"make gpu: --minutes {asked.minutes:g}: no positive number of minutes", file=sys.stderr)
        return 2
    folder = asked.out.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        print(f"make gpu: --out {asked.out}: {exc.strerror}", file=sys.stderr)
        return 2
    is_toy = asked.toy or not has_cuda
    tell_machine(folder, is_toy)
    chosen = [one for one in SECTIONS if asked.sections is None or one.name in asked.sections]
    if is_toy:  # of a few cores one process takes most
        chosen = [replace(one, workers=1) for one in chosen]
    if asked.profile:
        chosen = [Section(f"profile {asked.profile}", f"Profile of {asked.profile}", 1)]
    end = time.time() + 60 * asked.minutes
    run_sections(chosen, folder, end, How(is_toy, asked.short, asked.resume))
    path = write_report(folder)
    print(f"{path}\n{verdict(folder)}")
    return 0 if holds(folder) else 1


def tell_machine(folder: Path, is_toy: bool) -> None:
    found = about() | {"others": others() if torch.cuda.is_available() else "", "is toy": is_toy}
    (folder / "machine.json").write_text(json.dumps(found, indent=1) + "\n")
    card, versions = (
        found.get("card", {}),
        ", ".join(f"{name} {text}" for name, text in found["versions"].items()),
    )
    where = (
        f"{card['name']}"
        if card
        else "no CUDA device: toy sizes, Triton's interpreter, times that mean nothing"
    )
    print(f"{where}; {versions}", flush=True)
    (folder / LOG).unlink(missing_ok=True)
    if found["others"]:
        print(f"note: {found['others']}", flush=True)


def run_sections(chosen: list[Section], folder: Path, end: float, how: How) -> None:
    for section in chosen:
        if not how.is_resumed:  # what an earlier run left would stand beside this one's
            Journal.open(folder, section.name).path.unlink(missing_ok=True)
    for number, section in enumerate(chosen):
        left = end - time.time()
        limit = seconds_of(chosen[number:], left)
        if limit < NEAR_END:
            print(f"{section.title}: no time is left", flush=True)
            continue
        print(f"{section.title}: begins, {limit:.0f} s for it, {left:.0f} s in all", flush=True)
        journal = run_section(section, folder, limit, how)
        left = max(0.0, end - time.time())
        print(
            f"{section.title}: {journal.content['state']}, {counted(journal)}; {left:.0f} s left", flush=True
        )
        write_report(folder)


def counted(journal: Journal) -> str:
    """`12 rows done, 1 failed, 2 not begun`."""
    states = [row["state"] for row in journal.rows] + ["not begun"] * len(
        journal.content.get("not begun", ())
    )
    told = [
        f"{states.count(state)} {state}"
        for state in ("done", "failed", "cut", "skipped", "not begun")
        if state in states
    ]
    return ", ".join(told) or "no rows"


def failures(folder: Path) -> list[str]:
    journal = Journal.open(folder, "right")
    found = [f"{row['name']}: {row.get('why', '')}"[:300] for row in journal.rows if row["state"] == "failed"]
    return found + ([journal.content["why"]] if journal.content["state"] == "failed" else [])


def holds(folder: Path) -> bool:
    return not failures(folder)


def verdict(folder: Path) -> str:
    rows, wrong = Journal.open(folder, "right").rows, failures(folder)
    if not rows and not wrong:
        return "no check was made"
    made = sum(row["state"] in ("done", "failed") for row in rows)
    return "\n".join(
        [f"{max(0, made - len(wrong))} of {made} checks hold", *(f"  differs: {text}" for text in wrong)]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
