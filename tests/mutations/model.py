"""`ParallelModel` and its options: loops, evaluations, adapters, what is refused."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/model/outputs.py",
        "tests/model/test_outputs.py -k has_changed",
        ("return one.__self__ is other.__self__ and one.__func__ is other.__func__", "return one is other"),
    ),
    *planted(
        "autoptd/model/outputs.py",
        "tests/model/test_outputs.py -k another_function",
        ("if len(self._functions) == MAX_FUNCTIONS:", "if False:"),
    ),
    *planted(
        "autoptd/model/adapters.py",
        "tests/model/test_adapters.py -k could_not_read",
        ("if self._module is None or self._path:", "if True:"),
    ),
    *planted(
        "autoptd/model/batches.py",
        "tests/model/test_batches.py::test_a_worker_ends_when_its_own_rank_ends_it",
        (
            "while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:",
            "while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent != parent:",
        ),
    ),
    *planted(
        "autoptd/model/parallel_model.py",
        "tests/model/test_instead.py",
        ("parallelize(..., fuse='inductor'), which", "parallelize(..., fuse='triton_only'), which"),
        ("if name in INSTEAD:", "if name in ():"),
        ("class WrongCall(PlanError, AttributeError):", "class WrongCall(PlanError):"),
    ),
    *planted(
        "autoptd/model/loop_changes.py",
        "tests/hostile/test_loaded_buffers.py tests/parity/test_buffers.py",
        # An evaluation is compiled with the buffers that the ranks have by then.
        ("if own.is_meta or self._first.get(change.path) == Stamp.of(own):", "if False:"),
    ),
    *planted(
        "autoptd/model/loop_changes.py",
        "tests/model/test_loop_changes.py",
        ("if is_late or", "if True or"),
        ("return not is_new or time.monotonic() < self._rest_until", "return False"),
        # The tensors of the model.
        ("with sorted_as(self._given, self._sorts, without_values):", "with nullcontext():"),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_loop_look.py",
        ("if sys.getprofile() is None:", "if True:"),
        ("if sys.getprofile() is self:", "if True:"),
        ("self._left < 0 or ", ""),
        (" or self._watch() is None:", ":"),
        ('(reader.f_code in READS or reader.f_code.co_name == "<genexpr>")', "reader.f_code in READS"),
        ("home == CLIPPING or ", ""),
        ('is_users and "grad" in names', "is_users and False"),
        ("is_users = not home.startswith", "is_users = home.startswith"),
        ("if is_users else home == AVERAGES)", "if is_users else False)"),
        ("bool(names & WRITES) or ", ""),
        ("KEEPS_AVERAGE.search(reader.f_code.co_qualname) is not None", "False"),
        ("watch.is_stale() and self._has_any(parameters)", "watch.is_stale()"),
        ("self._average is not None and watch is not None and watch.is_stale()", "self._average is not None"),
        ("given if isinstance(given, (list, tuple)) else []", "[]"),
        ("all(x.grad is None for x in parameters) and ", ""),
        ("if not loss.requires_grad and not loss.ndim:", "if False:"),
        ('"copy_" for x in body if', '"copy_" for x in [] if'),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_loop_look.py -k until_garbage",
        ("            self._itself = self\n", ""),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_loop_changes.py",
        ("if is_counted or not is_rounded(entries, now[3]):", "if is_counted:"),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_loop_changes.py",
        ("if written and exchanges == self._exchanges:", "if written:"),
        ("            self._told.add(WRITTEN)\n", ""),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_loop_look.py",
        ("self._are_the_users |= bool(self._written)", "pass"),
        # Gradients that stay.
        ("elif self._are_kept and not self._has_read:", "elif False:"),
        ("(not by_value or bool(x.grad.any()))", "True"),
        ("= 0, False, False", "= 0, False, self._are_mixed"),
        ("self._unused, self._are_kept, self._are_mixed = 0", "self._unused, _, self._are_mixed = 0"),
        # The look.
        ("self._look.stop() and self.updates", "self._look.stop()"),
        ("can_be and (module is given or _are_same(module, given))", "can_be"),
        ("not self._is_early or any(", "any("),
        ("can_be = not self._is_early or", "can_be = True or"),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_loop_watch.py",
        ("ADDS_UP if self._has_optimizer else NO_OPTIMIZER", "ADDS_UP"),
        ("text not in self._told and _has_gradients(tensors)", "text not in self._told"),
        ("and not is_skipped and closure is None and", "and not is_skipped and"),
        ("if tensors and not _has_gradients(tensors):", "if tensors:"),
        ("self.updates + bool(self.steps)", "self.updates"),
        (" or _is_own_call():", ":"),
        ("model.register_forward_pre_hook(AtForward(", "str(AtForward("),
        ('        return getattr, ({}, "get")\n', "        return partial, (slice,)\n"),
        ("if torch.compiler.is_compiling():", "if False:"),
        ("return self.updates > 0 and self._has_weights()", "return self._has_weights()"),
        ("weakref.finalize(self, handle.remove).atexit = False", "pass"),
    ),
    *planted(
        "autoptd/model/updates.py",
        "tests/model/test_optimizer_request.py",
        ("keywords = {**cls.keywords, **keywords}", "keywords = {**keywords, **cls.keywords}"),
        ("value != known[name].default", "True"),
    ),
    *planted(
        "autoptd/model/loop_watch.py",
        "tests/model/test_optimizer_request.py",
        ("if found is not None and found[0]() is x else None", "if False else None"),
        ("            elif name in trained:", "            else:"),
    ),
    *planted(
        "autoptd/model/padded_calls.py",
        "tests/model/test_lengths.py::test_rows_are_added_with_a_mask_of_ones_own",
        ("self.rows, blank), tree)", "self.rows), tree)"),
    ),
    *planted(
        "autoptd/model/padded_calls.py",
        "tests/parity/test_buffers.py::test_padding_would_count",
        ("check_updates(first)", "first"),
    ),
    *planted(
        "autoptd/model/parallel_model.py",
        "tests/model/test_loop_look.py -k model_is_closed",
        ("        self.run.loop.close()\n", ""),
    ),
    *planted(
        "autoptd/model/parallel_model.py",
        "tests/subject/test_copies.py",
        ("def __reduce_ex__(", "def _reduce("),
    ),
    *planted(
        "autoptd/model/run.py",
        "tests/runtime/checkpoint/test_bad_input.py",
        ('self._unusable = what and f"{what} did not end"', 'self._unusable = ""'),
    ),
    *planted(
        "autoptd/model/run.py",
        "tests/runtime/checkpoint/test_checkpointer.py -k overwrites_the_state",
        ("            release()\n", "            pass\n"),
    ),
    *planted(
        "autoptd/model/sizes.py",
        "tests/model/test_eval_rows.py",
        ("and own[0] <= shape[0])", ")"),
        ("and own[1:] == shape[1:] ", ""),
        ("check_structure(first, args, kwargs, call)", "check_structure(first, args, kwargs)"),
    ),
    *planted(
        "autoptd/model/steps.py",
        "tests/processes/test_lengths.py",
        ("            self._calls.refuse_unequal(args, kwargs)\n", "            pass\n"),
    ),
    *planted(
        "autoptd/model/steps.py",
        "tests/test_bad_input.py",
        ("if not torch.is_grad_enabled():", "if False:"),
    ),
    *planted(
        "autoptd/model/updates.py",
        "tests/hostile/test_torch_clip.py -k finite",
        ("        if error_if_nonfinite:\n", "        if False:\n"),
    ),
    *planted(
        "autoptd/model/updates.py",
        "tests/model/test_loop_watch.py",
        ("optimizer.on_zero = self._loop.clear", "pass"),
    ),
    *planted(
        "autoptd/model/updates.py",
        "tests/parity/test_fp16.py",
        ("and p in (1, 2, inf):", "and p:"),
    ),
    *planted(
        "autoptd/model/updates.py",
        "tests/parity/test_fp16.py -k value",
        ('self._run.loss_scale.saw(ranks.run("clip_grad_value_"', 'print(ranks.run("clip_grad_value_"'),
    ),
    *planted(
        "autoptd/options/keyword.py",
        "tests/test_keywords.py",
        ("setting.keyword.check(setting.name, value, setting.default)", "pass"),
        ("    check_plain(keywords)\n", ""),
    ),
    *planted(
        "autoptd/options/options.py",
        "tests/test_keywords.py",
        ("MAX_RANKS = 2**20", "MAX_RANKS = 10**40"),
    ),
    *planted(
        "autoptd/options/spelling.py",
        "tests/test_options.py",
        # Records next to flat names.
        ("            found |= said\n", ""),
        ("    if old:\n", "    if False:\n"),
    ),
)
