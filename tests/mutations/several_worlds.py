"""Several models of one process group."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/runtime/world/rendezvous.py", "tests/runtime/world/test_several_worlds.py"
MUTATIONS = (
    Mutation(FILE, "    count_world(default_store(), rank)\n", "", TESTS),
    Mutation(FILE, "if count[0] == 0:", "if True:", TESTS),
    Mutation("autoptd/runtime/world/processes.py", "if self.is_closed:", "if False:", TESTS),
    Mutation("autoptd/runtime/step/launch.py", "if self._world.is_closed:", "if False:", TESTS),
)
