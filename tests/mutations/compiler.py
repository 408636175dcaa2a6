"""Passes, the compiler around them, and emitted files."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/compiler/compiler.py",
        "tests/model/test_outputs.py",
        ("if is_training and is_same_size and outputs is None:", "if is_training and is_same_size:"),
    ),
    *planted(
        "autoptd/compiler/records/outputs.py",
        "tests/model/test_outputs.py",
        ("shape[0] * batch.rows // batch.traced_rows", "shape[0]"),
    ),
    *planted(
        "autoptd/passes/solve/batch_types.py",
        "tests/model/test_outputs.py",
        ("(kind.dim, kind.atom) != (0, 0)", "kind.dim != 0"),
        ("(kind.dim, kind.atom) != (0, 0)", "kind.atom != 0"),
    ),
    *planted(
        "autoptd/passes/cut.py",
        "tests/passes/test_cut.py -k cut_points",
        ("return points[:: max(step, 1)]", "return points"),
        ("len(points) // (MIN_POINTS_PER_STAGE * stages)", "len(points)"),
    ),
    *planted(
        "autoptd/codegen/body.py",
        "tests/hostile/test_names.py",
        ('writer.comment(2, f"{module}{source}")', 'writer.add(2, f"# {module}{source}")'),
    ),
    *planted(
        "autoptd/codegen/files.py",
        "tests/hostile/test_names.py",
        ("check_source(name, source)", "pass"),
    ),
    *planted(
        "autoptd/codegen/files.py",
        "tests/hostile/test_names.py -k updated",
        ("{quoted(name)}: ", "{chr(34)}{name}{chr(34)}: "),
    ),
    *planted(
        "autoptd/codegen/writer.py",
        "tests/codegen/test_written_names.py",
        (" or len(parts) == 1:", ":"),
        ("shown(text),\n            WIDTH", "text,\n            WIDTH"),
    ),
    *planted(
        "autoptd/compiler/batch.py",
        "tests/model/test_eval_rows.py",
        ("sum(counts) // own, options.mesh", "max(counts) // own * len(counts), options.mesh"),
    ),
    *planted(
        "autoptd/compiler/batch.py",
        "tests/parity/test_row_groups.py",
        ("max(rows, 2 * group if group > 1 else 2)", "max(rows, 2)"),
    ),
    *planted(
        "autoptd/compiler/batch.py",
        "tests/test_bad_input.py -k empty",
        ("or 0 in leaves[batched[0]].shape[1:]", ""),
        ("if not (sum(counts) if counts else total) or", "if"),
    ),
    *planted(
        "autoptd/compiler/request.py",
        "tests/test_keywords.py",
        ("if cause is not None and (", "if cause is None and ("),
    ),
    *planted(
        "autoptd/compiler/request.py",
        "tests/model/test_eval_rows.py",
        ("    if request.counts:\n        raise", "    if False:\n        raise"),
    ),
    *planted(
        "autoptd/compiler/request.py",
        "tests/parity/test_row_groups.py",
        ("if isinstance(first, FewRows):", "if False:"),
        ("batch.tracing(math.lcm(2 * rows, batch.rows))", "batch.tracing(rows)"),
    ),
    *planted(
        "autoptd/compiler/compiler.py",
        "tests/compiler/test_program_cache.py -k read_evaluates",
        ("if is_same_size and first.graphs and outputs is None:\n", "if is_same_size and outputs is None:\n"),
        ("like = first if first.graphs else first.follows", "like = first"),
    ),
    *planted(
        "autoptd/compiler/driver.py",
        "tests/trace/test_precision.py",
        ("cast_buffers=narrowing.cast, traced", "traced"),
    ),
    *planted(
        "autoptd/compiler/peak_memory.py",
        "tests/parity/test_losses.py -k counted_after",
        (
            "            set_batch_sums(stage, [inputs], lambda own, _: own)\n            if stage.counts:",
            "            if stage.counts:",
        ),
    ),
    *planted(
        "autoptd/compiler/records/collectives.py",
        "tests/parity/test_counts.py",
        (
            'for conversion, what in (("batch sums", "sums over"), ("batch maxima", "largest entries of")):',
            'for conversion, what in (("batch sums", "sums over"),):',
        ),
    ),
    *planted(
        "autoptd/compiler/records/specs.py",
        "tests/hostile/test_operators.py -k without_elements",
        ("record.needs_grad and parameter.numel() > 0", "record.needs_grad"),
    ),
    *planted(
        "autoptd/compiler/warn.py",
        "tests/parity/test_sequence_parallel.py -k changes_nothing",
        (
            "in splitter.tokens:\n                return True",
            "in splitter.tokens:\n                return False",
        ),
        ("if axes and not any(", "if False and not any("),
    ),
    *planted(
        "autoptd/compiler/request.py",
        "tests/parity/test_mixing.py",
        ("if rows not in self.known:", "if True:"),
    ),
    *planted(
        "autoptd/passes/solve/splits.py",
        "tests/hostile/test_operators.py -k without_elements",
        ("return unit > 0 if", "return True if"),
    ),
    *planted(
        "autoptd/passes/buffer_updates.py",
        "tests/parity/test_buffers.py::test_two_steps_are_those_of_one_device",
        ("return ours, theirs, tail if ctx.traces_all else of_all", "return ours, theirs, tail"),
    ),
    *planted(
        "autoptd/passes/communicate.py",
        "tests/passes/solve/test_batch_types.py -k share",
        ("if source.over(axis) != gives.over(axis):", "if False:"),
    ),
    *planted(
        "autoptd/passes/context.py",
        "tests/parity/test_shift.py",
        # The second trace is rewritten like the first, or they are not compared.
        ("return self.whole if self.found.whole is None else self.found.whole", "return self.whole"),
    ),
    *planted(
        "autoptd/passes/conversion_reasons.py",
        "tests/passes/test_conversion_reasons.py",
        # A view would be as cheap in shards: the price is that of the operator that reads it.
        ("operand, user = _used(source, reader)", "operand, user = source, reader"),
    ),
    *planted(
        "autoptd/passes/kept/requested.py",
        "tests/hostile/test_names.py -k globs",
        ("if any(glob == path or fnmatchcase(path, glob) for path in paths):", "if not paths:"),
    ),
    *planted(
        "autoptd/passes/solve/batch_types.py",
        "tests/parity/test_statistics.py",
        ("or any(note(operand).rows.is_largest for operand in partial)", ""),
    ),
)
