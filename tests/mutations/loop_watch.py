"""Loops that are ported by half."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS, LOOK = (
    "autoptd/model/loop_watch.py",
    "tests/model/test_loop_watch.py",
    "tests/model/test_loop_look.py",
)
LOOKED = "autoptd/model/loop_look.py"
MUTATIONS = (
    Mutation(FILE, "ADDS_UP if self._has_optimizer else NO_OPTIMIZER", "ADDS_UP", TESTS),
    Mutation(FILE, "text not in self._told and _has_gradients(tensors)", "text not in self._told", TESTS),
    Mutation(FILE, "and not is_skipped and closure is None and", "and not is_skipped and", TESTS),
    Mutation(FILE, "if tensors and not _has_gradients(tensors):", "if tensors:", TESTS),
    Mutation(FILE, "self.updates + bool(self.steps)", "self.updates", TESTS),
    Mutation(FILE, "self._are_the_users |= bool(self._written)", "pass", LOOK),
    Mutation(FILE, " or _is_own_call():", ":", TESTS),
    Mutation(FILE, "model.register_forward_pre_hook(AtForward(", "str(AtForward(", TESTS),
    Mutation(FILE, '        return getattr, ({}, "get")\n', "        return partial, (slice,)\n", TESTS),
    Mutation(FILE, "if torch.compiler.is_compiling():", "if False:", TESTS),
    Mutation(FILE, "return self.updates > 0 and self._has_weights()", "return self._has_weights()", TESTS),
    Mutation(FILE, "weakref.finalize(self, handle.remove).atexit = False", "pass", TESTS),
    Mutation("autoptd/model/updates.py", "optimizer.on_zero = self._loop.clear", "pass", TESTS),
    # Gradients that stay.
    Mutation(FILE, "elif self._are_kept and not self._has_read:", "elif False:", LOOK),
    Mutation(FILE, "(not by_value or bool(x.grad.any()))", "True", LOOK),
    Mutation(FILE, "= 0, False, False", "= 0, False, self._are_mixed", LOOK),
    Mutation(
        FILE,
        "self._unused, self._are_kept, self._are_mixed = 0",
        "self._unused, _, self._are_mixed = 0",
        LOOK,
    ),
    # The look.
    Mutation(FILE, "self._look.stop() and self.updates", "self._look.stop()", LOOK),
    Mutation(LOOKED, "if sys.getprofile() is None:", "if True:", LOOK),
    Mutation(LOOKED, "if sys.getprofile() is self:", "if True:", LOOK),
    Mutation(LOOKED, "self._left < 0 or ", "", LOOK),
    Mutation(LOOKED, " or self._watch() is None:", ":", LOOK),
    Mutation(
        LOOKED,
        '(reader.f_code in READS or reader.f_code.co_name == "<genexpr>")',
        "reader.f_code in READS",
        LOOK,
    ),
    Mutation(LOOKED, "home == CLIPPING or ", "", LOOK),
    Mutation(LOOKED, 'is_users and "grad" in names', "is_users and False", LOOK),
    Mutation(LOOKED, "is_users = not home.startswith", "is_users = home.startswith", LOOK),
    Mutation(LOOKED, "if is_users else home == AVERAGES)", "if is_users else False)", LOOK),
    Mutation(LOOKED, "bool(names & WRITES) or ", "", LOOK),
    Mutation(LOOKED, "KEEPS_AVERAGE.search(reader.f_code.co_qualname) is not None", "False", LOOK),
    Mutation(LOOKED, "watch.is_stale() and self._has_any(parameters)", "watch.is_stale()", LOOK),
    Mutation(
        LOOKED,
        "self._average is not None and watch is not None and watch.is_stale()",
        "self._average is not None",
        LOOK,
    ),
    Mutation(LOOKED, "given if isinstance(given, (list, tuple)) else []", "[]", LOOK),
    Mutation(LOOKED, "all(x.grad is None for x in parameters) and ", "", LOOK),
    Mutation(LOOKED, "if not loss.requires_grad and not loss.ndim:", "if False:", LOOK),
    Mutation(FILE, "can_be and (module is given or _are_same(module, given))", "can_be", LOOK),
    Mutation(FILE, "not self._is_early or any(", "any(", LOOK),
    Mutation(FILE, "can_be = not self._is_early or", "can_be = True or", LOOK),
    Mutation(LOOKED, '"copy_" for x in body if', '"copy_" for x in [] if', LOOK),
    Mutation(
        "autoptd/model/loop_look.py",
        "            self._itself = self\n",
        "",
        "tests/model/test_loop_look.py -k until_garbage",
    ),
    Mutation(
        "autoptd/model/parallel_model.py",
        "        self._loop.close()\n",
        "",
        "tests/model/test_loop_look.py -k model_is_closed",
    ),
)
