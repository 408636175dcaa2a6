"""What ranks do: steps, parameters, optimizers, checkpoints, and how they fail."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/runtime/params/units.py",
        "tests/parity/test_zero.py -k not_read_before",
        (
            "                bucket.wait()\n                bucket.read.give_back()",
            "                bucket.read.give_back()",
        ),
    ),
    *planted(
        "autoptd/program/gathers.py",
        "tests/parity/test_divided.py -k calls",
        ("return layers[::-1] if action.kind is Kind.B else layers", "return layers"),
    ),
    *planted(
        "autoptd/runtime/params/gradient_buckets.py",
        "tests/parity/test_divided.py -k any_order",
        ("self._sum = part if self._sum is None else self._sum.add_(part)", "self._sum = part"),
    ),
    *planted(
        "autoptd/codegen/layers.py",
        "tests/parity/test_divided.py -k no_layers",
        (
            " | _passed(graph, crossing, stages)",
            "",
        ),
    ),
    *planted(
        "autoptd/runtime/params/guard.py",
        "tests/parity/test_divided.py -k absent",
        ("        if self.is_absent:\n", "        if False:\n"),
    ),
    *planted(
        "autoptd/runtime/params/parameters.py",
        "tests/parity/test_divided.py -k nan",
        ("if (spec.has_master or spec.is_apart) and stored", "if spec.has_master and stored"),
    ),
    *planted(
        "autoptd/runtime/world/slurm.py",
        "tests/runtime/world/test_slurm.py",
        (
            'if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:',
            'if "SLURM_PROCID" not in environ:',
        ),
        (
            'for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")',
            'for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")',
        ),
        ("{number:0{len(low)}}", "{number}"),
        ("for name, value in found.items() if name not in environ", "for name, value in found.items()"),
    ),
    *planted(
        "autoptd/runtime/world/rendezvous.py",
        "tests/runtime/world/test_slurm.py",
        ("if not 0 <= rank < size:", "if rank < 0:"),
    ),
    *planted(
        "autoptd/runtime/step/outputs.py",
        "tests/model/test_outputs.py",
        ("(microbatches * spec.shape[0], *spec.shape[1:])", "(spec.shape[0], *spec.shape[1:])"),
        ("if kept and world.replica == teller else None", "if kept else None"),
        (".sum(0, dtype=dtype)", ".mean(0, dtype=dtype)"),
        ("sorted(by_replica)", "reversed(sorted(by_replica))"),
    ),
    *planted(
        "autoptd/runtime/checkpoint/commit.py",
        "tests/runtime/checkpoint/test_bad_input.py -k neighbour",
        ("if not here.name or not here.parent", "if not here.parent"),
    ),
    *planted(
        "autoptd/runtime/checkpoint/restore.py",
        "tests/runtime/checkpoint/test_bad_input.py -k dtype",
        ("stored.itemsize > saved.itemsize", "True"),
    ),
    *planted(
        "autoptd/runtime/checkpoint/restore.py",
        "tests/runtime/checkpoint/test_other_dtypes.py",
        ("dtype = stored.dtype if is_own else dtype_of(saved)", "dtype = dtype_of(saved)"),
    ),
    *planted(
        "autoptd/runtime/checkpoint/manifest.py",
        "tests/runtime/checkpoint/test_bytes.py",
        ("yield (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :]), part", "yield offsets, part"),
    ),
    *planted(
        "autoptd/runtime/checkpoint/storage.py",
        "tests/runtime/checkpoint/test_others.py -k test_nothing_of_a_checkpoint_is_executed",
        ("if is_dtype or name in KNOWN.get(module, ()):", "if module:"),
    ),
    *planted(
        "autoptd/runtime/step/microbatches.py",
        "tests/runtime/step/test_call.py -k gradient",
        ("elif leaf.requires_grad and", "elif leaf.is_leaf and leaf.requires_grad and"),
        ('leaf.requires_grad and call == "step"', "leaf.requires_grad"),
    ),
    *planted(
        "autoptd/runtime/checks/copies.py",
        "tests/runtime/checks/test_settings.py",
        ("if not differing:", "if True:"),
        ("or key in OF_SCHEDULERS ", ""),
        (".intersection(*everywhere)", ""),
        ("for _, count in found} - {None}) > 1", "for _, count in found}) < 0"),
        (" if has_parameters else None", ""),
    ),
    *planted(
        "autoptd/runtime/folders/disk.py",
        "tests/runtime/checkpoint/test_bad_input.py -k test_a_changed_byte",
        ("if self._crcs is not None and zlib.crc32(into) != self._crcs[number]:", "if False:"),
    ),
    *planted(
        "autoptd/runtime/ops/recompute.py",
        "tests/parity/test_recompute.py -k kernel_of_forward",
        ("else mask.requires_grad_()", "else mask"),
    ),
    *planted(
        "autoptd/runtime/ops/recompute.py",
        "tests/runtime/ops/test_recompute.py",
        ("stride if size > 1 else 0", "stride"),
    ),
    *planted(
        "autoptd/runtime/params/storage.py",
        "tests/runtime/params/test_edits.py",
        ("if x._version != versions[name] or (", "if ("),
        ("or (_was_exposed(x) and self._differs(name, x))", ""),
        ('getattr(x, "was_exposed", True)', "x.was_exposed"),
    ),
    *planted(
        "autoptd/runtime/params/trial.py",
        "tests/runtime/params/test_own_optimizers.py",
        ("STARTS = (1.0, 1e-4)", "STARTS = (1.0,)"),
        ("without_first=True", "without_first=False"),
        ("{**_copied(options), ", "{"),
        ('found + ["constructor"] * ("__init__" in names)', "found"),
    ),
    *planted(
        "autoptd/runtime/params/grad_norm.py",
        "tests/hostile/test_torch_clip.py -k by_value",
        ("torch._foreach_clamp_min_(same, -value)", "torch._foreach_clamp_min_(same, 0.0)"),
    ),
    *planted(
        "autoptd/runtime/params/grad_norm.py",
        "tests/parity/test_hooks.py -k more_exact",
        ("for name in [name for name in gradients if name not in params.plain]:", "for name in list[str]():"),
    ),
    *planted(
        "autoptd/runtime/params/grad_norm.py",
        "tests/runtime/params/test_gradients.py",
        ('all_reduce(both, SITE, op="max")', "all_reduce(both, SITE)"),
        ("torch.where(is_nan > 0, torch.nan, size)", "size"),
        ("total.pow(1 / p)", "total.pow(1 / 2)"),
        ("norms_of(tensors, device, p).pow(p)", "norms_of(tensors, device, p).pow(2)"),
    ),
    *planted(
        "autoptd/runtime/params/gradients.py",
        "tests/runtime/checkpoint/test_unused_gradients.py",
        ("self.params.is_update_due = True", "pass"),
    ),
    *planted(
        "autoptd/runtime/params/gradients.py",
        "tests/runtime/params/test_gradients.py",
        ("        if count < self._expected[name]:\n", "        if count <= self._expected[name]:\n"),
    ),
    *planted(
        "autoptd/runtime/params/guard.py",
        "tests/hostile/test_torch_clip.py -k by_hand",
        ('return guard_square(result, "parameter") if _is_square(func, args) else result', "return result"),
        ("return func in POWERS or (", "return ("),
        (" and args[0] is args[1])", ")"),
        (" and result.dim() == 0:", ":"),
    ),
    *planted(
        "autoptd/runtime/params/guard.py",
        "tests/parity/test_zero.py -k what_a_user_sees",
        ("if func in WRITES or (func == GRADIENT and not _asks_whether_it_exists()):", "if func in WRITES:"),
        ('return not is_loaded and "hasattr" in code.co_names', "return False"),
    ),
    *planted(
        "autoptd/runtime/params/guard.py",
        "tests/runtime/params/test_edits.py",
        # numpy writes where no version counts.
        ("        Tensor.detach,\n        Tensor.data_ptr,\n", ""),
    ),
    *planted(
        "autoptd/runtime/params/loss_scale.py",
        "tests/parity/test_fp16.py -k scale",
        ("if 2 * self.value <= MAX_SCALE:", "if True:"),
        ("max(self.value / 2, self.least)", "self.value / 4"),
    ),
    *planted(
        "autoptd/runtime/params/loss_scale.py",
        "tests/parity/test_fp16.py -k value",
        ("norm if self._norm is None else self._norm + norm", "norm"),
    ),
    *planted(
        "autoptd/runtime/params/namespace.py",
        "tests/runtime/step/test_executor.py -k withheld",
        ("        self._wait()\n", ""),
        ("() if self._is_withheld else self._places", "self._places"),
        ("        self.give_back()\n        *path", "        *path"),
        ("last if _is_attribute(last) else None, node", "last, node"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/hostile/test_names.py -k globs",
        ("[spec.name for spec in specs if item in (spec.name, *spec.aliases)]", "[]"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/model/test_parallel_model.py -k optimizer_refusals",
        ("if specs and not any(groups):", "if False:"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/runtime/checkpoint/test_unused_gradients.py",
        ("    params.hand_gradients()\n    params.is_update_due = False\n", "    params.hand_gradients()\n"),
        ("set_to_none)\n                params.is_update_due = False\n", "set_to_none)\n"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/runtime/checks/test_settings.py",
        ("if not optimizer.is_within:", "if True:"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/runtime/params/test_own_optimizers.py",
        (
            "        groups = names_in_groups(trial, optimizer, run)\n",
            "        names_in_groups(trial, optimizer, run)\n",
        ),
        ("for text in filter(None, findings):", "for text in ():"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/runtime/params/test_own_optimizers.py -k run_once",
        ('if getattr(own, "hooked", False):', "if False:"),
    ),
    *planted(
        "autoptd/runtime/params/whole.py",
        "tests/runtime/params/test_whole.py -k one_device",
        ("                start += leg.nbytes\n", ""),
        ("x = x.narrow(dim, start, size)", "x = x.narrow(dim, 0, size)"),
        ("        self._move(self._copy, self._copied, self._in_store, self._copies)\n", ""),
        ("        self._spread_tied()\n", ""),
    ),
    *planted(
        "autoptd/runtime/params/whole.py",
        "tests/runtime/params/test_whole.py -k balanced",
        ("rank = min(ranks, key=lambda rank: loads[rank])", "rank = ranks[0]"),
    ),
    *planted(
        "autoptd/runtime/params/whole.py",
        "tests/runtime/params/test_whole.py -k some_ranks",
        ("if (gradient is not None) != has_gradient:", "if False:"),
    ),
    *planted(
        "autoptd/runtime/params/whole.py",
        "tests/runtime/params/test_whole.py -k may_not",
        ("if edited := self._edits.found():", "if edited := []:"),
    ),
    *planted(
        "autoptd/runtime/world/exchange.py",
        "tests/runtime/params/test_whole.py -k one_device",
        ("target[:number] == own[:number] and ", ""),
        ("to[target[number]].append(pair)", "to[source[number]].append(pair)"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/runtime/params/test_whole.py -k one_device",
        ("        if homes:\n            spread(optimizer)\n", ""),
        ("        before(collect)\n", "        pass\n"),
    ),
    *planted(
        "autoptd/runtime/checkpoint/restore.py",
        "tests/runtime/params/test_whole.py -k any_state",
        (", *self._wants_at_home()", ""),
    ),
    *planted(
        "autoptd/runtime/params/parameters.py",
        "tests/parity/test_unfreezing.py",
        ("if parameter.requires_grad != requires_grad:", "if False:"),
    ),
    *planted(
        "autoptd/runtime/params/parameters.py",
        "tests/runtime/params/test_edits.py",
        # Nor does the runtime's own reading cost a comparison in every step.
        ("    @unguarded()\n    def __init__(", "    def __init__("),
        ("in [*self.local.items(), *self.edits.stored.items()]", "in self.local.items()"),
        ("            if spec.name in written:\n                continue\n", ""),
    ),
    *planted(
        "autoptd/runtime/params/trial.py",
        "tests/runtime/params/test_own_optimizers.py",
        ("return calls[0] == calls[1]", "return True"),
        ("if place.get(name) != number:", "if name not in place:"),
    ),
    *planted(
        "autoptd/runtime/params/storage.py",
        "tests/runtime/params/test_own_optimizers.py",
        ("return flat.view(*[1] * (ndim - 1), -1) if ndim else flat.view(())", "return flat"),
    ),
    *planted(
        "autoptd/runtime/step/per_step.py",
        "tests/model/test_eval_rows.py",
        ('"batch sums": (SUMS, "sum", 0.0),\n', ""),
    ),
    *planted(
        "autoptd/runtime/step/per_step.py",
        "tests/parity/test_statistics.py",
        ("(is_nan > 0, math.nan)", "(is_nan > 2, math.nan)"),
        ('"max": torch.amax}', '"max": torch.sum}'),
        ('"max", -math.inf)', '"max", 0.0)'),
    ),
    *planted(
        "autoptd/runtime/step/per_step.py",
        "tests/parity/test_buffers.py::test_two_steps_are_those_of_one_device",
        ("(not spec.is_sum and world.replica != self._teller)", "not spec.is_sum and False"),
    ),
    *planted(
        "autoptd/runtime/step/per_step.py",
        "tests/processes/test_lengths.py::test_batches_of_several_lengths_over_gloo[few]",
        ("next((i for i, rows in enumerate(program.row_counts) if rows), 0)", "0"),
    ),
    *planted(
        "autoptd/runtime/step/executor.py",
        "tests/model/test_eval_rows.py",
        (" if pair[0].microbatch < len(microbatches)", ""),
        ("mesh.axes if 0 in self.program.row_counts else ", ""),
    ),
    *planted(
        "autoptd/runtime/step/executor.py",
        "tests/parity/test_buffers.py::test_two_steps_are_those_of_one_device",
        ("stage.parts = {}", "stage.parts = stage.parts"),
    ),
    *planted(
        "autoptd/runtime/step/executor.py",
        "tests/parity/test_losses.py -k counted_after",
        (
            "            if stage.rounds:\n                self.world.at = SUMS",
            "            if stage.rounds and not stage.counts:\n                self.world.at = SUMS",
        ),
    ),
    *planted(
        "autoptd/runtime/step/executor.py",
        "tests/parity/test_statistics.py",
        ("group.all_reduce(own, SUMS, op)", "group.all_reduce(own, SUMS)"),
    ),
    *planted(
        "autoptd/runtime/step/launch.py",
        "tests/runtime/world/test_several_worlds.py",
        ("if self._world.is_closed:", "if False:"),
    ),
    *planted(
        "autoptd/runtime/step/launch.py",
        "tests/test_keywords.py",
        ("    check_device(device)\n", ""),
    ),
    *planted(
        "autoptd/runtime/step/microbatches.py",
        "tests/model/test_eval_rows.py",
        ("% pieces else asked", "% 1 else asked"),
        # Replicas that have other numbers of rows, or none.
        ("sum(program.row_counts[:replica])", "0"),
    ),
    *planted(
        "autoptd/runtime/step/microbatches.py",
        "tests/test_bad_input.py -k list",
        ("if is_list and len(args[0])", "if is_list and 0 * len(args[0])"),
    ),
    *planted(
        "autoptd/runtime/step/buffers.py",
        "tests/parity/test_buffer_names.py",
        ("self.shared.names_of(first)", "(first,)"),
    ),
    *planted(
        "autoptd/runtime/step/pad_batch.py",
        "tests/model/test_lengths.py::test_numbers_that_hide_that_padding_is_read",
        ("for sign in (-1.0, 1.0):", "for sign in (1.0,):"),
        ("for sign in (-1.0, 1.0):", "for sign in (-1.0,):"),
        ("return rows % 2 == 0", "return rows >= 0"),
        ("torch.where(_covered(x), x, 1)", "x"),
        ("torch.where(x == padding, x.max(), x)", "x"),
    ),
    *planted(
        "autoptd/runtime/step/pad_batch.py",
        "tests/model/test_lengths.py::test_rows_are_added_with_a_mask_of_ones_own",
        ("or spec.name in blank:", "or False:"),
    ),
    *planted(
        "autoptd/runtime/step/pad_batch.py",
        "tests/test_bad_input.py -k empty",
        ('longer if length else "a batch of at least one token"', "longer"),
        ("at least one row, and at most", "at most"),
    ),
    *planted(
        "autoptd/runtime/step/stage.py",
        "tests/parity/test_buffers.py::test_two_steps_are_those_of_one_device",
        ("self.parts[number] += part.detach()", "self.parts[number] = part.detach().double()"),
    ),
    *planted(
        "autoptd/runtime/world/faults.py",
        "tests/runtime/world/test_faults.py -k before_it_arrived",
        ("if left := first_that_left(words):", "if left := ():"),
    ),
    *planted(
        "autoptd/runtime/world/faults.py",
        "tests/runtime/world/test_faults.py",
        ("if known.get(number, what) != what:", "if False:"),
        ("known.get(number, what)", "known.get(number)"),
    ),
    *planted(
        "autoptd/runtime/world/threads.py",
        "tests/runtime/world/test_world.py -k ctrl_c",
        ("self.raise_first_fault()", "pass"),
    ),
    *planted(
        "autoptd/runtime/world/faults.py",
        "tests/runtime/world/test_faults.py",
        ("self._has_left = not isinstance(exc, Exception)", "self._has_left = False"),
        ("if cause := cause_of_end():", "if cause := '':"),
        ("            stay_for(2 * BEAT, self._store)", "            time.sleep(2 * BEAT)"),
        ('self._left = self._left or "its script called pm.close()"', "pass"),
    ),
    *planted(
        "autoptd/runtime/world/faults.py",
        "tests/runtime/world/test_world.py -k both_named",
        ("self._check_others(call, self._pages)", "pass"),
    ),
    *planted(
        "autoptd/runtime/world/faults.py",
        "tests/runtime/world/test_world.py -k interrupted",
        ("if self._first is not None and self._end_waits is not None:", "if False:"),
    ),
    *planted(
        "autoptd/runtime/world/rendezvous.py",
        "tests/wings/reports/test_excepthook.py",
        ('teller = store.compare_set(key, "", own).decode()', 'teller = "0"'),
        ('while not store.check([f"{key}: done"]) and', "while False and"),
    ),
    *planted(
        "autoptd/runtime/world/pages.py",
        "tests/runtime/world/test_faults.py",
        ("or text[at + len(start) :] == ", "or text[at + len(start) :] != "),
    ),
    *planted(
        "autoptd/runtime/world/processes.py",
        "tests/runtime/world/test_several_worlds.py",
        ("if self.is_closed:", "if False:"),
    ),
    *planted(
        "autoptd/runtime/world/rendezvous.py",
        "tests/runtime/world/test_several_worlds.py",
        ("    count_world(default_store(), rank)\n", ""),
        ("if count[0] == 0:", "if True:"),
    ),
    *planted(
        "autoptd/runtime/world/threads.py",
        "tests/runtime/world/test_world.py::test_ctrl_c_before_a_rank_has_its_job",
        ("jobs.put(_has_ended)", "pass"),
    ),
    *planted(
        "autoptd/runtime/world/world.py",
        "tests/runtime/world/test_world.py -k order_of_ranks",
        ("for part in parts[1:]:", "for part in parts[:0:-1]:"),
    ),
)
