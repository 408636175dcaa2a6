"""Mutations of what notices that a loop changes the model from outside."""

from tests.mutations import Mutation

TESTS, CACHES = "tests/model/test_loop_changes.py", "tests/trace/test_caches.py"
MUTATIONS = (
    Mutation("autoptd/model/loop_changes.py", "if is_late or", "if True or", TESTS),
    Mutation(
        "autoptd/model/loop_changes.py",
        "return not is_new or time.monotonic() < self._rest_until",
        "return False",
        TESTS,
    ),
    # An evaluation is compiled with the buffers that the ranks have by then.
    Mutation(
        "autoptd/model/loop_changes.py",
        "if own.is_meta or self._first.get(change.path) == Stamp.of(own):",
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
    # What a program patches.
    Mutation(
        "autoptd/trace/reads.py",
        "            self._take(path, OfFunction(function))\n",
        "            pass\n",
        TESTS,
    ),
    Mutation(
        "autoptd/trace/reads.py",
        "self._take(module.__name__, Names",
        "0 and self._take(module.__name__, Names",
        TESTS,
    ),
    Mutation("autoptd/trace/reads.py", "self._waiting.append((path, value.data))", "pass", TESTS),
    Mutation("autoptd/trace/reads.py", "(names.keys() | vars(builtins).keys())", "names.keys()", TESTS),
    Mutation("autoptd/trace/patched.py", "or _is_operator(name, value)", "", TESTS),
    Mutation("autoptd/trace/patched.py", "if one is SETTINGS[0] or", "if", TESTS),
    Mutation("autoptd/trace/again.py", "with given_masks(any_mask):", "if True:", TESTS),
    Mutation("autoptd/trace/again.py", "(_trained(captured) ^ self.trained)", "frozenset()", TESTS),
    # The tensors of the model.
    Mutation(
        "autoptd/model/loop_changes.py",
        "with sorted_as(self._given, self._sorts, without_values):",
        "with nullcontext():",
        TESTS,
    ),
    Mutation(
        "autoptd/model/loop_watch.py", "if written and exchanges == self._exchanges:", "if written:", TESTS
    ),
    Mutation("autoptd/model/loop_watch.py", "            self._told.add(WRITTEN)\n", "", TESTS),
    Mutation(
        "autoptd/model/loop_tensors.py",
        "if is_counted or not is_rounded(entries, now[3]):",
        "if is_counted:",
        TESTS,
    ),
    # Caches of functions.
    Mutation(
        "autoptd/trace/watched.py", "if not changes and not watched.seen.filled:", "if not changes:", CACHES
    ),
    Mutation("autoptd/trace/caches.py", "and not any(_has_object(x) for x in held)", "", CACHES),
    Mutation("autoptd/trace/writes.py", "            cache.drop_filled()\n", "            pass\n", CACHES),
    Mutation(
        "autoptd/model/steps.py",
        "if not torch.is_grad_enabled():",
        "if False:",
        "tests/test_bad_input.py",
    ),
)
