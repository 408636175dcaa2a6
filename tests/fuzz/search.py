"""Draw cases, run them, count what happened, and shrink what fails to a small script.

A case passes when `autoptd.verify` does. A refusal (PlanError or TraceError) is counted by its fact: too many of them and the
search tests nothing. Anything else is a finding.

    tally = search(cases=100, minutes=10.0, seed=0, folder=Path("out/fuzz"));  print(tally.report())
"""

from __future__ import annotations

import linecache
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from autoptd.errors import PlanError, TraceError
from tests.fuzz.features import CHOICES, Case, cases
from tests.fuzz.script import script

ROUND = 10  # cases of one run of hypothesis: from the eleventh on it would repeat parts of earlier ones
SIMPLEST = Case({name: choices[0] for name, choices in CHOICES.items()})
Run = Callable[[Case], None]


@dataclass
class Tally:
    """What a search did."""

    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Case] = field(default_factory=dict)  # the first case of each kind
    features: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Path] = field(default_factory=dict)  # kind of failure -> its script
    again: list[tuple[Case, Exception]] = field(default_factory=list)  # more of these kinds, not shrunk

    @property
    def ran(self) -> int:
        return self.outcomes.total()

    def count(self, case: Case, outcome: str, refusal: str = "") -> None:
        """Add one case."""
        self.outcomes[outcome] += 1
        self.features.update(case.features)
        if refusal:
            self.refusals[refusal] += 1
            self.refused.setdefault(refusal, case)

    def report(self) -> str:
        """The tally as text: outcomes, refusals by kind, cases per feature, findings."""
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        lines = [
            f"{self.ran} cases in {self.seconds:.0f} s, {self.ran / max(self.seconds, 1e-9):.2f} per second: {counts}"
        ]
        lines += [f"  refused {count:5}  {fact}" for fact, count in self.refusals.most_common()]
        groups: dict[str, list[str]] = {}
        for feature, count in sorted(self.features.items()):
            name, pick = feature.split(": ", 1)
            groups.setdefault(name, []).append(f"{pick} {count}")
        lines += [f"  {name:18}  {'   '.join(picks)}" for name, picks in groups.items()]
        lines += [f"  FOUND {kind}\n        {path}" for kind, path in self.findings.items()]
        return "\n".join(lines)


def run_case(case: Case) -> None:
    """Run the script of a case; raises what it raises."""
    text = script(case)
    name = f"<case {abs(hash(text)):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    try:
        exec(compile(text, name, "exec"), {"__name__": "case"})
    finally:
        del linecache.cache[name]


def search(
    cases: int,
    minutes: float,
    seed: int,
    folder: Path,
    run: Run = run_case,
    show: Callable[[str], None] = print,
    without: Collection[str] = (),
) -> Tally:
    """Run up to `cases` random cases for up to `minutes` or Ctrl-C; write each kind of finding, shrunk, to `folder`."""
    tally, start, round_number = Tally(), time.monotonic(), 0
    while tally.ran < cases and time.monotonic() - start < 60 * minutes:
        fresh = min(ROUND, cases - tally.ran + 1)  # the first is the simplest
        try:
            failure = run_round(fresh, seed * 100_003 + round_number, tally, run, without)
        except KeyboardInterrupt:
            break
        round_number += 1
        tally.seconds = time.monotonic() - start
        if failure is not None:
            _record(tally, *failure, folder, show)
        for i, (case, error) in enumerate(tally.again):
            (folder / f"again_{i}.py").write_text(reproducer(case, error))
        show(f"{tally.seconds:6.0f} s  {tally.ran} cases  {dict(tally.outcomes)}")
    return tally


def run_round(
    count: int, number: int, tally: Tally, run: Run = run_case, without: Collection[str] = ()
) -> tuple[Case, Exception] | None:
    """Draw and run `count` cases; return the smallest case that fails, and how, or None."""
    failures: list[tuple[Case, Exception]] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(cases(without))
    def one(case: Case) -> None:
        if case == SIMPLEST and tally.ran and not failures:  # every run of hypothesis begins with it
            return
        try:
            refusal = refusal_of(case, run)
        except Exception as error:
            if not failures:
                tally.count(case, "failed")
            if kind_of(error) in tally.findings and not failures:
                tally.again.append((case, error))  # one of its kind was shrunk before
                return
            failures.append((case, error))
            raise
        if not failures:  # what shrinking tries does not count
            tally.count(case, "refused" if refusal else "passed", refusal)

    try:
        one()
    except Exception as error:
        if not failures:
            raise
        return failures[-1][0], error  # hypothesis runs the smallest one last
    return None


def refusal_of(case: Case, run: Run) -> str:
    """Run a case: the kind of its refusal, or "" when it passed."""
    try:
        run(case)
    except (PlanError, TraceError) as error:
        return kind_of(error)
    return ""


def kind_of(error: Exception) -> str:
    """An error without its names and numbers: equal for the same failure of different models."""
    first = [*str(getattr(error, "fact", error)).splitlines(), ""][0]
    return f"{type(error).__name__}: {re.sub(r'[0-9][0-9.e+-]*', 'N', first)}"[:160]


def reproducer(case: Case, error: Exception) -> str:
    """A complete script, with what it raises as its docstring."""
    lines = [line.replace("\\", "/") for line in f"{type(error).__name__}: {error}".splitlines()[:8]]
    return '"""Found by tests.fuzz:\n\n' + "\n".join(lines) + '\n"""\n\n' + script(case)


def _record(tally: Tally, case: Case, error: Exception, folder: Path, show: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"finding_{len(tally.findings)}.py"
    path.write_text(reproducer(case, error))
    tally.findings[kind_of(error)] = path
    show(f"\n{path}:\n\n{path.read_text()}")
