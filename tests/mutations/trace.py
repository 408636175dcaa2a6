"""Traces of a model, and their comparison with it."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/trace/again.py",
        "tests/model/test_outputs.py -k has_changed",
        ("outputs.keys() == others.keys() and all(", "True or all("),
    ),
    *planted(
        "autoptd/trace/loss.py",
        "tests/model/test_outputs.py -k collects",
        (
            "return WithLoss(self.model, self.loss_fn if self._wanted is None else self._wanted)",
            "return WithLoss(self.model, self.loss_fn)",
        ),
    ),
    *planted(
        "autoptd/trace/reads.py",
        "tests/model/test_outputs.py -k has_changed",
        (', ("outputs", loss_fn.outputs)]', "]"),
    ),
    *planted(
        "autoptd/ir/buffers.py",
        "tests/subject/test_copies.py",
        ("if one.dtype.itemsize > 1 or not one.is_floating_point():", "if True:"),
    ),
    *planted(
        "autoptd/ir/buffers.py",
        "tests/ir/test_buffers.py",
        ("if flat.stride() != (1,):", "if not flat.is_contiguous():"),
    ),
    *planted(
        "autoptd/ir/names.py",
        "tests/codegen/test_written_names.py",
        ('name = free_name(identifier(wanted, "layer_"))\n', "return free_name(wanted)\n"),
        ('unicodedata.normalize("NFKC", text)', "text"),
    ),
    *planted(
        "autoptd/trace/again.py",
        "tests/model/test_loop_changes.py",
        # Another trace is a change only where its values are others.
        ("if [before[node] for node in _results(self.graph)] ==", "if [] =="),
        ("with given_masks(any_mask):", "if True:"),
        ("(_trained(captured) ^ self.trained)", "frozenset()"),
    ),
    *planted(
        "autoptd/trace/statistics.py",
        "tests/parity/test_buffers.py::test_statistics_are_averages_over_all_steps",
        ("make(aten.rsub.Scalar, momentum, 1) if", "make(aten.rsub.Scalar, momentum, 2) if"),
    ),
    *planted(
        "autoptd/trace/statistics.py",
        "tests/trace/test_rounding.py",
        ("dtype = torch.promote_types(value(kept).dtype, value(own).dtype)", "dtype = value(kept).dtype"),
    ),
    *planted(
        "autoptd/trace/tensor_values.py",
        "tests/trace/test_branches.py",
        ("and self._drawn[id(x)][1] == x._version", ""),
        ("and self._compared[id(x)][1] == x._version", ""),
        ("or 0 < bound < 1:", "or False:"),
        ("and dtype.itemsize < 4:", "and False:"),
        ("return not raising", "return raising"),
        ("return raising[0] if len(raising) == 1 else None", "return True"),
    ),
    *planted(
        "autoptd/trace/changes.py",
        "tests/trace/test_caches.py",
        (" and any(x is not None for x in held_in(self._function))", ""),
        ("value.fget if isinstance(value, property) else value", "value"),
        ("self._count = self._misses() - begun", "self._count = self._misses()"),
        ("return self._function.cache_info().misses", "return self._function.cache_info().currsize"),
        ("return found[2 : place", "return found[1 : place"),
        ("and not any(_has_object(x) for x in held)", ""),
    ),
    *planted(
        "autoptd/trace/calls.py",
        "tests/trace/test_caches.py",
        ("(*BUILT_IN, partial, _lru_cache_wrapper)", "(*BUILT_IN, partial)"),
    ),
    *planted(
        "autoptd/trace/calls.py",
        "tests/trace/test_calls.py",
        # A method of a dict's is passed over where it only reads.
        (" and function.__name__ in READS", ""),
    ),
    *planted(
        "autoptd/trace/calls.py",
        "tests/trace/test_writes.py",
        # What map is handed is called as well.
        ("elif isinstance(arg, (*BUILT_IN, partial, _lru_cache_wrapper)):", "elif False:"),
        # What print is handed as its file is written to.
        ("isinstance(file, io.IOBase) and not", "False and not"),
        # The size of a cache says how often a forward ran.
        ('if name == "cache_info":', "if False:"),
        ("elif name in SETS_OF_SLOTS and args:", "elif False:"),
        ("function.__name__ in SEEDS:", "False:"),
        # What is written to a terminal is nobody's state.
        (" or _is_terminal(owner):", ":"),
    ),
    *planted(
        "autoptd/trace/watch.py",
        "tests/model/test_loop_changes.py",
        ("own_containers(wrapper), products:", "products:"),
    ),
    *planted(
        "autoptd/trace/capture.py",
        "tests/trace/test_branches.py",
        ("if checks.tried is not None:", "if False:"),
    ),
    *planted(
        "autoptd/trace/capture.py",
        "tests/trace/test_sizes.py",
        (r"|\.numpy\(\) is not supported", ""),
        ("isinstance(error, DATA_DEPENDENT) or ", ""),
        # A model that swallows the error.
        ("            if checks.refused is not None:\n", "            if False:\n"),
    ),
    *planted(
        "autoptd/trace/watch.py",
        "tests/trace/test_sizes.py",
        ("            checks.refuse(error)\n", ""),
        ('raise checks.refuse(TraceError("Tensor.register_hook"', 'raise (TraceError("Tensor.register_hook"'),
        ("            self._checks.refuse(error)\n", ""),
    ),
    *planted(
        "autoptd/trace/faithful.py",
        "tests/trace/test_rounding.py",
        ("        if not size <= tolerance:\n", "        if False:\n"),
        ("if fault is not None:", "if False:"),
    ),
    *planted(
        "autoptd/trace/functionalize.py",
        "tests/trace/test_faithful.py",
        ("sizes[1] + 1)", "sizes[1])"),
        ('if dim == 0 and argument(node, "wrap")', "if False"),
        ("    aten.pow_.Scalar: aten.pow.Tensor_Scalar,\n", ""),
        ("args[::-1]", "args"),
        ("older |= {whole, *_aliases(whole, {*views})}", "older |= {whole}"),
        ("older |= {whole, *_aliases(whole, {*views})}", "pass"),
        ('(whole is not base and whole.op == "placeholder")', "False"),
    ),
    *planted(
        "autoptd/trace/functionalize.py",
        "tests/trace/test_functionalize.py",
        # A write that the example does not show.
        ("0 in _changed(node)", 'name.endswith("_") and not name.endswith("__")'),
        ("            _refuse_other_writes(node)\n", ""),
        ('is_old or not op_name(node).startswith("aten.")', "is_old"),
    ),
    *planted(
        "autoptd/trace/functions.py",
        "tests/trace/test_functions.py -k without_gradient",
        (".requires_grad_(is_so)", ".requires_grad_()"),
    ),
    *planted(
        "autoptd/trace/instructions.py",
        "tests/trace/test_writes.py",
        # Code that is run from a text is no import.
        (" and _is_importing(frame):", ":"),
    ),
    *planted(
        "autoptd/trace/loss.py",
        "tests/trace/test_loss.py",
        ("leaf.numel() == 1 and", "leaf.dim() == 0 and"),
        ("[leaf for leaf in singles if leaf.dim() == 0] or singles", "singles"),
        ("return loss.reshape(()) if loss.dim() else loss", "return loss"),
        ("each.default is None and each.name", "each.name"),
        ("names = left_out() if not scalars else ()", "names = ()"),
    ),
    *planted(
        "autoptd/trace/own_failure.py",
        "tests/test_keywords.py",
        ("        kept.put_back()\n", "        pass\n"),
    ),
    *planted(
        "autoptd/trace/faithful.py",
        "tests/trace/test_rounding.py",
        ("model = copy.deepcopy(self.model)\n", "model = self.model\n"),
        ("env[node] = leaf.to(dtypes.get(dtype, dtype))", "env[node] = leaf.to(dtype)"),
    ),
    *planted(
        "autoptd/trace/reads.py",
        "tests/model/test_loop_changes.py",
        ("or _is_operator(name, value)", ""),
        ("if one is SETTINGS[0] or", "if"),
    ),
    *planted(
        "autoptd/trace/writes.py",
        "tests/trace/test_tally.py",
        # A list has several names, and one in a tuple cannot be replaced there.
        ("        if not places:\n            return []\n", ""),
    ),
    *planted(
        "autoptd/trace/precision.py",
        "tests/parity/test_buffer_names.py",
        ("self._made.setdefault(id(x), (x, made))[1]", "made"),
    ),
    *planted(
        "autoptd/trace/precision.py",
        "tests/parity/test_mixed.py -k in_16_bits",
        (
            "allowed = STORABLE if precision in COMPUTE_DTYPES else",
            "allowed = STORABLE if precision is None else",
        ),
    ),
    *planted(
        "autoptd/trace/precision.py",
        "tests/trace/test_precision.py",
        (
            "        self._set(self._given)\n\n    @property",
            "        self._set(list(self._kinds))\n\n    @property",
        ),
        (
            "return captured if self._fits(captured.graph) else self._searched(trace) or captured",
            "return captured",
        ),
        ("if caster.has(place.own)]", "if False]"),
    ),
    *planted(
        "autoptd/trace/record.py",
        "tests/hostile/test_names.py -k file",
        ("source, code = self._lines.innermost()", 'source, code = "", ""'),
    ),
    *planted(
        "autoptd/trace/record.py",
        "tests/parity/test_buffer_names.py",
        ("self._first_name.get(in_model(path), in_model(path))", "in_model(path)"),
    ),
    *planted(
        "autoptd/trace/record.py",
        "tests/trace/test_autocast.py -k without",
        ("without_grad=not torch.is_grad_enabled()", "without_grad=False"),
        ("                reader.replace_input_with(node, last)\n", "                pass\n"),
    ),
    *planted(
        "autoptd/trace/record.py",
        "tests/trace/test_other_rows.py",
        ("raise TraceError(site(self._in_inference)", "TraceError(site(self._in_inference)"),
    ),
    *planted(
        "autoptd/trace/results.py",
        "tests/trace/test_results.py",
        # What decides what an operator returns.
        ("            torch.is_grad_enabled(),\n", ""),
        ("            torch.get_default_dtype(),\n", ""),
        ("arg.requires_grad, arg.is_neg())", "arg.is_neg())"),
        ("return kind, arg\n", "return arg\n"),
        ("if torch._C._len_torch_dispatch_stack() != self._depth:", "if False:"),
        ("        self._depth = torch._C._len_torch_dispatch_stack()\n", "        self._depth = 0\n"),
        # What a result is.
        ("number = next((i for i, one in enumerate(operands) if one is made), None)", "number = None"),
        (
            "            if not self.requires_grad:\n                return made\n",
            "            return made\n",
        ),
        ("                    self.run_all = True\n", "                    pass\n"),
        ("self.run_all |= _asks_autograd(func)", "pass"),
        # A result that is found again.
        ("            self._known[key] = kind, found\n", "            pass\n"),
        ("            if not operands:\n                raise Unknown\n", ""),
    ),
    *planted(
        "autoptd/trace/capture.py",
        "tests/trace/test_results.py",
        ("        if not others and not (known and results.run_all):", "        if not others:"),
    ),
    *planted(
        "autoptd/trace/reads.py",
        "tests/model/test_loop_changes.py",
        # What a program patches.
        ("            self._take(path, OfFunction(function))\n", "            pass\n"),
        ("self._take(module.__name__, Names", "0 and self._take(module.__name__, Names"),
        ("self._waiting.append((path, value.data))", "pass"),
        ("(names.keys() | vars(builtins).keys())", "names.keys()"),
    ),
    *planted(
        "autoptd/trace/faithful.py",
        "tests/trace/test_rounding.py",
        ("if exact.has_other_value():", "if False:"),
        ("faults = exact.other_rounding(pair, tolerance)", "faults = {}"),
        ("TRIES = 6", "TRIES = 1"),
        ("> MOST_ENTRIES:", "> 1 << 60:"),
    ),
    *planted(
        "autoptd/trace/changes.py",
        "tests/trace/test_writes.py",
        # An object may hold more than its attributes.
        ("(each.args, ", "("),
        ("    if _hides_something(one):\n        return False\n", ""),
    ),
    *planted(
        "autoptd/trace/tensor_values.py",
        "tests/trace/test_sizes.py",
        ("if name in REMEDIES or", "if"),
        ("name = CALLED.get(name, name)", "pass"),
        ("REMEDIES.get(name, OTHERS)", "OTHERS"),
    ),
    *planted(
        "autoptd/trace/statistics.py",
        "tests/parity/test_statistics.py",
        ("max(count - correction, 0)", "count"),
        ("correction = 1 if given is None else given", "correction = 1"),
        ('correction = int(argument(node, "unbiased"))', "correction = 1"),
        ("torch.promote_types(value(x).dtype, torch.float32)", "value(x).dtype"),
        ("total, 1 / p)", "total, 1 / 2)"),
        ("and 0 in _dims(node)", "and False"),
        ("is_largest=name in LARGEST)", "is_largest=True)"),
        ('if name == "aten.logsumexp":', "if False:"),
        ("is_largest=p > 0)", "is_largest=True)"),
    ),
    *planted(
        "autoptd/trace/watched.py",
        "tests/trace/test_tally.py",
        # A number that a branch reads does not only log.
        ("        self.is_read = True\n", "        pass\n"),
    ),
    *planted(
        "autoptd/trace/changed_buffers.py",
        "tests/parity/test_buffer_names.py::test_all_names_follow",
        ("len({_place(model, twin) for twin in names}) > 1 and", "True and"),
    ),
    *planted(
        "autoptd/trace/changed_buffers.py",
        "tests/parity/test_buffer_names.py::test_state_of_a_loss_that_nobody_saves_is_refused",
        ("if of_loss not in own", "if False"),
    ),
    *planted(
        "autoptd/trace/changed_buffers.py",
        "tests/parity/test_buffer_names.py::test_what_would_not_follow_is_refused",
        ("and not assigned.isdisjoint(names)", "and False"),
    ),
    *planted(
        "autoptd/trace/users.py",
        "tests/trace/test_writes.py",
        # Python's library keeps what the user's code hands it.
        ('"inspect", "contextlib",', '"inspect", "contextlib", "threading",'),
    ),
    *planted(
        "autoptd/trace/instructions.py",
        "tests/trace/test_value_stack.py",
        # Of a Python that nobody tried it on, no memory is read.
        ("and version in TRIED", ""),
    ),
    *planted(
        "autoptd/trace/watch.py",
        "tests/trace/test_capture.py -k data",
        ("return args[0].detach()", "pass"),
        ("if func == SET_DATA and", "if False and"),
    ),
    *planted(
        "autoptd/trace/watch.py",
        "tests/trace/test_capture.py -k numbers_of_writes",
        ("if func == VERSION and", "if False and"),
    ),
    *planted(
        "autoptd/trace/watched.py",
        "tests/trace/test_caches.py",
        ("            if x._version:\n", "            if True:\n"),
        ("        x.mul_(2)\n", "        x.mul_(1)\n"),
        ("            x.mul_(0.5)\n", "            x.mul_(1)\n"),
        ("                kept.put_back()\n", "                pass\n"),
        # Caches of functions.
        ("if not changes and not watched.seen.filled:", "if not changes:"),
    ),
    *planted(
        "autoptd/trace/watched.py",
        "tests/trace/test_tally.py",
        # C asks for the class of a list where no stand-in sees it.
        ("run((args, kwargs), note_reading)", "run((args, kwargs))"),
    ),
    *planted(
        "autoptd/trace/watched.py",
        "tests/trace/test_writes.py",
        # A second call may fail for what the first one has left.
        ("    except Exception:\n        # It ran", "    except ImportError:\n        # It ran"),
    ),
    *planted(
        "autoptd/trace/writes.py",
        "tests/model/test_loop_changes.py",
        # Attributes are asked for by names that are made.
        ("            self.asked.add(str(args[1]))\n", "            pass\n"),
    ),
    *planted(
        "autoptd/trace/writes.py",
        "tests/trace/test_caches.py",
        ("            cache.drop_filled()\n", "            pass\n"),
    ),
    *planted(
        "autoptd/trace/writes.py",
        "tests/trace/test_writes.py",
        # A read of a defaultdict makes what it lacks.
        ('hasattr(type(owner), "__missing__")', "False"),
        # What only a record keeps alive is gone with the call.
        ("                while _drop(", "                while False and _drop("),
        # Who refers to what is not seen of objects that the user froze.
        ("gc.get_freeze_count() > 0", "False"),
        # Python's collector goes on between traces, and what is young before one is no longer.
        ("        gc.collect(0)\n", "        pass\n"),
        # Nothing of these has a dict that shows it.
        ('name == "__class__":', "False:"),
        ("elif _is_of_c(owner, name):", "elif False:"),
    ),
    *planted(
        "autoptd/verify/one_device.py",
        "tests/trace/test_branches.py",
        ("torch.full_like(x, 0.5)", "torch.zeros_like(x)"),
    ),
)
