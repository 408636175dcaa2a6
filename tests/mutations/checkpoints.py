"""Checkpoints: their checksums, their metadata, another dtype."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/runtime/checkpoint/restore.py",
        "dtype = stored.dtype if is_own else dtype_of(saved)",
        "dtype = dtype_of(saved)",
        "tests/runtime/checkpoint/test_other_dtypes.py",
    ),
    Mutation(
        "autoptd/runtime/checkpoint/check.py",
        "stored.itemsize > saved.itemsize",
        "True",
        "tests/runtime/checkpoint/test_bad_input.py -k dtype",
    ),
    Mutation(
        "autoptd/runtime/folders/disk.py",
        "if self._crcs is not None and zlib.crc32(into) != self._crcs[number]:",
        "if False:",
        "tests/runtime/checkpoint/test_bad_input.py -k test_a_changed_byte",
    ),
    Mutation(
        "autoptd/runtime/checkpoint/storage.py",
        "if is_dtype or name in KNOWN.get(module, ()):",
        "if module:",
        "tests/runtime/checkpoint/test_others.py -k test_nothing_of_a_checkpoint_is_executed",
    ),
    Mutation(
        "autoptd/runtime/checkpoint/stage.py",
        "yield (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :]), part",
        "yield offsets, part",
        "tests/runtime/checkpoint/test_bytes.py",
    ),
)
