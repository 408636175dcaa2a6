"""Run passes in order, and check that each keeps its contract.

A pass is a function of a graph and a `Context`. It changes the graph in place (or returns another), and puts
further results into `ctx.found`. A decorator states its contract:

    @graph_pass(takes=Form.ANNOTATED, gives=Form.CONNECTED, changes=("calls", "reason"), ensures=check)
    def communicate(graph: Graph, ctx: Any) -> None: ...

In: the passes, a graph in the form that the first one takes, the context. Out: the graph in the form that the
last one gives; `Record` holds it in every earlier form. A broken contract is an InternalError that names the
pass.

    record = Record()
    graph = run_passes((annotate, communicate), traced, ctx, record)
    record.graphs["ANNOTATED"], record.seconds["communicate"]

Calling a pass directly, as its tests do, runs the bare function without checks. With AUTOPTD_DUMP, the graph is
written as text after every pass.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch.fx import Graph

from autoptd.errors import InternalError
from autoptd.ir.notes import Note, copy_graph, note, op_name, ops, payload, shape
from autoptd.ir.scopes import activity

# The second argument of a pass is a `Context`. This file only reads its findings and whether values are divided, and
# imports nothing that passes find.
Body = Callable[[Graph, Any], Graph | None]
# A check raises InternalError.
Check = Callable[[Graph, Any], None]
# What a pass may change besides the fields of a Note: the set of operators, and their arguments.
CALLS = "calls"
# The fields of a Note, which a pass may change only if its contract lists them.
GUARDED_FIELDS = tuple(field.name for field in fields(Note))


class Form(IntEnum):
    """State which facts a graph carries; each form includes those of the earlier ones."""

    TRACED = 0
    ANNOTATED = 1
    CONNECTED = 2
    CUT = 3
    LOCAL = 4


@dataclass(frozen=True)
class Pass:
    """A pass with its contract.

    - `takes`, `gives`: the form of the graph before and after it.
    - `when`: tells whether a run needs it; it is skipped in all others.
    - `changes`: the fields of existing notes that it may change; with "calls" also operators and their
      arguments.
    - `finds`: the fields of the context's `Findings` that it fills.
    - `requires`, `ensures`: checks of the graph before and after it.
    """

    run: Body
    takes: Form
    gives: Form
    when: Callable[[Any], bool]
    changes: frozenset[str]
    finds: tuple[str, ...] = ()
    requires: Check | None = None
    ensures: Check | None = None

    @property
    def name(self) -> str:
        return self.run.__name__

    def __call__(self, graph: Graph, ctx: Any) -> Graph:
        returned = self.run(graph, ctx)
        return graph if returned is None else returned

    def __str__(self) -> str:
        return f"{self.name} ({self.takes.name} -> {self.gives.name})"


def graph_pass(
    *,
    takes: Form,
    gives: Form,
    when: Callable[[Any], bool] = lambda ctx: True,
    changes: Sequence[str] = (),
    finds: Sequence[str] = (),
    requires: Check | None = None,
    ensures: Check | None = None,
) -> Callable[[Body], Pass]:
    """Turn a function of (graph, context) into a pass with a contract: see `Pass`."""
    unknown = set(changes) - {CALLS, *GUARDED_FIELDS}
    if unknown:
        raise InternalError("graph_pass", f"notes have no {', '.join(sorted(unknown))}")

    def decorate(run: Body) -> Pass:
        return Pass(run, takes, gives, when, frozenset(changes), tuple(finds), requires, ensures)

    return decorate


def divides_values(ctx: Any) -> bool:
    """Tell whether values are split over ranks."""
    return ctx.mesh.value_ranks > 1


def divides_tokens(ctx: Any) -> bool:
    """Tell whether tokens are split over a separate mesh axis."""
    return bool(ctx.mesh.token_axes)


def divides_rows(ctx: Any) -> bool:
    """Tell whether the rows of a step are split over microbatches or replicas."""
    return ctx.pieces > 1


class Record:
    """Record a run: the graph in every form, and the CPU seconds of passes, contracts and copies.

    With AUTOPTD_DUMP=out/ in the environment, the graph is written to out/passes after every pass, unless
    `dump` is False. With `every_pass`, `after` has a copy of the graph after each pass.
    """

    def __init__(self, *, every_pass: bool = False, dump: bool = True) -> None:
        self.graphs: dict[str, Graph] = {}
        self.after: dict[str, Graph] = {}
        self.seconds: dict[str, float] = {}
        self._every_pass = every_pass
        folder = os.environ.get("AUTOPTD_DUMP") if dump else None
        self._dump = Dump(folder) if folder else None

    def keep(self, form: Form, graph: Graph) -> None:
        """Record `graph` under a form; it must not change afterwards."""
        self.graphs[form.name] = graph

    def begin(self, graph: Graph) -> None:
        """Record the graph that a run begins with."""
        if self._dump is not None:
            self._dump.begin("trace", graph)

    def add(self, made: Pass, graph: Graph) -> None:
        """Dump the graph after a pass and keep a copy of it, if requested."""
        if self._dump is not None:
            self._dump.add(made.name, graph)
        if self._every_pass:
            self.after[made.name] = copy_graph(graph)

    def copy(self, graph: Graph) -> Graph:
        """Copy a graph, and count the time under copies."""
        with self.timed("copies"):
            return copy_graph(graph)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the CPU seconds of a block."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.thread_time() - start


def run_passes(passes: Sequence[Pass], graph: Graph, ctx: Any, record: Record) -> Graph:
    """Run `passes` in order; return the graph that the last one gives.

    A TRACED graph is copied first, since several runs may begin with it, and earlier findings are cleared. A
    graph of a later form is changed in place, since the findings in the context refer to its nodes. Raises
    InternalError for a broken contract.
    """
    form = passes[0].takes
    if form is Form.TRACED:
        record.keep(form, graph)
        record.begin(graph)
        graph = record.copy(graph)
        ctx.found.forget()
    seen = _Seen(graph)
    for each in passes:
        if each.takes != form:
            fact = f"takes a graph that is {each.takes.name}, and gets one that is {form.name}"
            raise InternalError(str(each), fact)
        # Record before the form changes, so that each form is shown after its last pass.
        if each.gives != form and form is not Form.TRACED:
            record.keep(form, record.copy(graph))
        graph, seen = _run_pass(each, graph, seen, ctx, record)
        form = each.gives
        record.add(each, graph)
    record.keep(form, graph)
    return graph


def _run_pass(each: Pass, graph: Graph, before: _Seen, ctx: Any, record: Record) -> tuple[Graph, _Seen]:
    """Run one pass between its checks; raise InternalError if it breaks its contract."""
    with record.timed("contracts"):
        if each.requires is not None:
            _verify(each, "requires", each.requires, graph, ctx)
    with activity(each.name, is_brief=True), record.timed(each.name):
        graph = each(graph, ctx)
    with record.timed("contracts"):
        seen = _Seen(graph)
        findings = [f"should find {name}, and has not" for name in each.finds if not ctx.found.has(name)]
        findings += _changes(before, seen, each.changes)
        if findings:
            raise InternalError(str(each), "; ".join(findings))
        # Run this check last, since it may read the findings of the pass.
        if each.ensures is not None:
            _verify(each, "ensures", each.ensures, graph, ctx)
    return graph, seen


def _verify(each: Pass, what: str, check: Check, graph: Graph, ctx: Any) -> None:
    try:
        check(graph, ctx)
    except InternalError as error:
        raise InternalError(f"{each} {what} {error.site}", error.fact) from error


class _Seen:
    """Snapshot the note and the call of every node, by name, since a pass may return a copy of the graph."""

    def __init__(self, graph: Graph) -> None:
        # In the order of the fields, which is the fastest way to read them.
        self.facts = {node.name: tuple(vars(note(node)).values()) for node in graph.nodes}
        self.calls = {node.name: (node.target, node.args, node.kwargs) for node in graph.nodes}


def _changes(before: _Seen, after: _Seen, allowed: frozenset[str]) -> Iterator[str]:
    """Yield the changes of a pass outside its contract: the first node for each field."""
    first_changed: dict[str, str] = {}
    if CALLS not in allowed and before.calls != after.calls:
        names = [*after.calls, *before.calls]
        first_changed[CALLS] = next(name for name in names if before.calls.get(name) != after.calls.get(name))
    guarded = [i for i, field in enumerate(GUARDED_FIELDS) if field not in allowed]
    of_guarded = itemgetter(*guarded)
    for name, facts in before.facts.items():
        # A removed node is a change of CALLS.
        now = after.facts.get(name, facts)
        # Compare whole tuples first, since most passes leave most nodes unchanged.
        if now != facts and of_guarded(now) != of_guarded(facts):
            for i in guarded:
                if now[i] != facts[i]:
                    first_changed.setdefault(GUARDED_FIELDS[i], name)
    for field, name in first_changed.items():
        yield f"changes {field} of {name}, and may change {', '.join(sorted(allowed)) or 'nothing'}"


def up_to(form: Form, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes that give this form or an earlier one."""
    return tuple(each for each in passes if each.gives <= form)


class Dump:
    """Write `passes/NN_name.txt` files to a folder in order; a new run overwrites those of the previous one."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "passes"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number, self._before = 0, Counter[str]()

    def begin(self, name: str, graph: Graph) -> None:
        """Write the first graph of a run."""
        self._number, self._before = 0, Counter()
        self.add(name, graph)

    def add(self, name: str, graph: Graph) -> None:
        """Write the next graph."""
        counts = Counter(note(node).conversion or op_name(node) for node in ops(graph))
        change = []
        for operator in sorted({*counts, *self._before}):
            if counts[operator] != self._before[operator]:
                change.append(f"{counts[operator] - self._before[operator]:+d} {operator}")
        text = "\n".join([describe(graph), "change in operators:", *change, ""])
        path = self._folder / f"{self._number:02d}_{name}.txt"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        self._number, self._before = self._number + 1, counts


def describe(graph: Graph) -> str:
    """Return the text of a dump, one line per node: module, operator, shape, type over tp, reason."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        record = note(node)
        label = record.conversion or op_name(node).removeprefix("aten.")
        if node.op == "placeholder":
            label = record.kind
        name = record.name or record.module
        size = str(list((record.local.shapes or [shape(node)])[0]))
        stages = ",".join(map(str, record.stages))
        batch = {"S": "per row", "P": "sum over rows"}.get(record.layout.batch.kind, "")
        kind = record.layout.text(record.dims) if record.dims or not record.layout.shards else ""
        reason, fused = record.reason, record.fused.what
        why = "; ".join(filter(None, (record.rule, record.why, reason, fused, record.stages_why)))
        lines.append(f"{name:36} {label:24} {size:18} {kind:30} {batch:14} {stages:4} {why}".rstrip())
    total = sum(payload(node) for node in graph.nodes if note(node).kind == "param")
    return "\n".join([*lines, "", f"{len(lines)} nodes, {total:,} bytes of parameters", ""])
