"""Ranks that leave, and ranks whose scripts call different things."""

from __future__ import annotations

from tests.mutations import Mutation

BOARD = "autoptd/runtime/world/faults.py"
CALLS = "autoptd/runtime/world/calls.py"
FAULTS, WORLD = "tests/runtime/world/test_faults.py", "tests/runtime/world/test_world.py"
MUTATIONS = (
    Mutation(BOARD, "self._has_left = not isinstance(exc, Exception)", "self._has_left = False", FAULTS),
    Mutation(BOARD, "if cause := cause_of_end():", "if cause := '':", FAULTS),
    Mutation(
        BOARD,
        "if self._first is not None and self._end_waits is not None:",
        "if False:",
        f"{WORLD} -k interrupted",
    ),
    Mutation(BOARD, "self._check_others(call, self._pages)", "pass", f"{WORLD} -k both_named"),
    Mutation(CALLS, "if known.get(number, what) != what:", "if False:", FAULTS),
    Mutation(CALLS, "known.get(number, what)", "known.get(number)", FAULTS),
    Mutation(
        "autoptd/runtime/world/pages.py",
        "or text[at + len(start) :] == ",
        "or text[at + len(start) :] != ",
        FAULTS,
    ),
    Mutation(
        "autoptd/runtime/world/arrival.py",
        "if left := first_that_left(words):",
        "if left := ():",
        f"{FAULTS} -k before_it_arrived",
    ),
    Mutation(
        "autoptd/runtime/world/exchange.py",
        "self.raise_first_fault()",
        "pass",
        f"{WORLD} -k ctrl_c",
    ),
    Mutation(
        "autoptd/runtime/world/leaving.py",
        'teller = store.compare_set(key, "", own).decode()',
        'teller = "0"',
        "tests/wings/reports/test_excepthook.py",
    ),
    Mutation(
        "autoptd/runtime/world/leaving.py",
        'while not store.check([f"{key}: done"]) and',
        "while False and",
        "tests/wings/reports/test_excepthook.py",
    ),
    Mutation(
        "autoptd/runtime/world/faults.py",
        "            stay_for(2 * BEAT, self._store)",
        "            time.sleep(2 * BEAT)",
        "tests/runtime/world/test_faults.py",
    ),
    Mutation(
        "autoptd/runtime/world/faults.py",
        'self._left = self._left or "its script called pm.close()"',
        "pass",
        "tests/runtime/world/test_faults.py",
    ),
    Mutation(
        "autoptd/runtime/world/threads.py",
        "jobs.put(_has_ended)",
        "pass",
        "tests/runtime/world/test_world.py::test_ctrl_c_before_a_rank_has_its_job",
    ),
)
