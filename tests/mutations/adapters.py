"""Folders of models with adapters."""

from __future__ import annotations

from tests.mutations import Mutation

TESTS = "tests/model/test_adapters.py -k could_not_read"
MUTATIONS = (
    Mutation("autoptd/model/adapters.py", "if self._module is None or self._path:", "if True:", TESTS),
)
