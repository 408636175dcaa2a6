"""What `precision=` does to buffers."""

from __future__ import annotations

from tests.mutations import Mutation

TESTS = "tests/trace/test_precision.py"
MUTATIONS = (
    Mutation(
        "autoptd/trace/precision.py",
        "        self._set(self._given)\n\n    @property",
        "        self._set(list(self._kinds))\n\n    @property",
        TESTS,
    ),
    Mutation(
        "autoptd/trace/precision.py",
        "return captured if self._fits(captured.graph) else self._searched(trace) or captured",
        "return captured",
        TESTS,
    ),
    Mutation("autoptd/trace/precision.py", "if caster.has(place.own)]", "if False]", TESTS),
    Mutation("autoptd/compiler/driver.py", "cast_buffers=narrowing.cast, traced", "traced", TESTS),
    Mutation(
        "autoptd/trace/precision.py",
        "allowed = STORABLE if precision in COMPUTE_DTYPES else",
        "allowed = STORABLE if precision is None else",
        "tests/parity/test_mixed.py -k in_16_bits",
    ),
)
