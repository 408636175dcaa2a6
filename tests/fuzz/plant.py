"""Faults to plant, so that one can see the search find them: `python -m tests.fuzz --plant "no tied sum"`.

with planted("no f"):
    run_case(case)      # raises where the fault matters
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autoptd.program.program import Program
from autoptd.runtime.world.threads import ThreadRank

verify_module = importlib.import_module("autoptd.verify.verify")

REST = r"(?:[^()]|\([^()]*\))*"  # of the arguments, one of which may be a call
EDITS = {  # in the first stage file where it occurs: what to find, what to write
    "no f": (rf"= rt\.i_to_r\(\s*(\w+), tp{REST}\)", r"= \1"),
    "no g": (rf"= rt\.p_to_i\(\s*(\w+), tp{REST}\)", r"= \1"),
    "bias on every rank": (rf"= rt\.i_to_p\(\s*(w\.[\w.\[\]]+), tp{REST}\)", r"= \1"),
    "mean of microbatch means": (r"self\.totals\[\d\]", "((labels != -100).sum().clamp(min=1) * 2)"),
    "other masks": (r"((?:rt\.dropout|_dropout_add)\([^=]*?)self\.draw\(site=", r"\1self.draw(site=1 + "),
}
FAULTS = [*EDITS, "no tied sum"]


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """While it lasts, `verify` runs programs with this fault."""
    if fault == "no tied sum":
        with mock.patch.object(ThreadRank, "owners", lambda self, pp_ranks: self._solo):
            yield
        return
    right, (old, new) = verify_module.compile_program, EDITS[fault]

    def wrong(*args: Any, **kwargs: Any) -> Program:
        program = right(*args, **kwargs)
        for name, text in program.sources.items():
            if re.search(old, text):
                sources = {**program.sources, name: re.sub(old, new, text, count=1)}
                return dataclasses.replace(program, sources=sources)
        return program

    with mock.patch.object(verify_module, "compile_program", wrong):
        yield
