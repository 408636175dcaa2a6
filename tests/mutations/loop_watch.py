"""Loops that are ported by half."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/loop_watch.py", "tests/test_loop_watch.py"
MUTATIONS = (
    Mutation(FILE, "ADDS_UP if self._has_optimizer else NO_OPTIMIZER", "ADDS_UP", TESTS),
    Mutation(FILE, "text not in self._told and _has_gradients(tensors)", "text not in self._told", TESTS),
    Mutation(FILE, "and not is_skipped and closure is None and", "and not is_skipped and", TESTS),
    Mutation(FILE, "if tensors and not _has_gradients(tensors):", "if tensors:", TESTS),
    Mutation(FILE, "self.updates, self._unused = self.updates + bool(self.steps), 0", "pass", TESTS),
    Mutation(FILE, "_versions(module) == self._versions and ", "", TESTS),
    Mutation(FILE, " and not _is_own_call():", ":", TESTS),
    Mutation(FILE, "model.register_forward_pre_hook(AtForward(", "str(AtForward(", TESTS),
    Mutation(FILE, '        return getattr, ({}, "get")\n', "        return partial, (slice,)\n", TESTS),
    Mutation(FILE, "if torch.compiler.is_compiling():", "if False:", TESTS),
    Mutation(FILE, "return bool(self.updates) and text", "return text", TESTS),
    Mutation(FILE, "weakref.finalize(self, handle.remove).atexit = False", "pass", TESTS),
    Mutation("autoptd/parallel_model.py", "optimizer.on_zero = self._loop.clear", "pass", TESTS),
)
