"""Mutations of what notices that a loop changes the model from outside."""

from tests.mutations import Mutation

TESTS = "tests/test_loop_changes.py"
MUTATIONS = (
    Mutation("autoptd/loop_changes.py", "if any(one.is_number for one in culprits) or", "if True or", TESTS),
    Mutation(
        "autoptd/loop_changes.py",
        "return not is_new or time.monotonic() < self._rest_until",
        "return False",
        TESTS,
    ),
    # An evaluation is compiled with the buffers that the ranks have by then.
    Mutation(
        "autoptd/loop_changes.py",
        "if self._first.get(change.path) == Stamp.of(own):",
        "if False:",
        "tests/hostile/test_loaded_buffers.py tests/parity/test_buffers.py",
    ),
    # Another trace is a change only where its values are others.
    Mutation(
        "autoptd/trace/again.py", "if [before[node] for node in _results(self.graph)] ==", "if [] ==", TESTS
    ),
    # Attributes are asked for by names that are made.
    Mutation(
        "autoptd/trace/writes.py", "            self.asked.add(str(args[1]))\n", "            pass\n", TESTS
    ),
    Mutation(
        "autoptd/trace/capture.py", "            around.enter_context(own_containers(wrapper))\n", "", TESTS
    ),
)
