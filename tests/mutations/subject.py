"""How a model is read, and the format of its programs and folders."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/program/sources.py",
        "tests/model/test_pretrained.py -k by_hand",
        ("if name not in self.left_out] or [spec.name]", "if name not in self.left_out][:1] or [spec.name]"),
    ),
    *planted(
        "autoptd/program/about.py",
        "tests/parity/test_buffers.py::test_updates_go_on_where_a_checkpoint_was_saved",
        ("loss = loss.args[0]", "break"),
    ),
    *planted(
        "autoptd/subject/contents.py",
        "tests/trace/test_writes.py",
        ("if below is None or isinstance(below, torch.Tensor):", "if below is None:"),
        # An array is written to by its views.
        ("        value = below\n", "        break\n"),
    ),
    *planted(
        "autoptd/subject/initial/tape.py",
        "tests/subject/initial/test_replay.py",
        (
            'hashlib.shake_256(key.encode()).digest(4 * MERSENNE_WORDS), dtype="<u4")',
            'hashlib.blake2b(key.encode(), digest_size=4).digest() * MERSENNE_WORDS, dtype="<u4")',
        ),
    ),
    *planted(
        "autoptd/subject/match_folder.py",
        "tests/model/test_pretrained.py -k by_hand",
        ("if first[name] == first[source]}", "}"),
        ("model.get_expanded_tied_weights_keys(all_submodels=True)", "model.all_tied_weights_keys"),
    ),
    *planted(
        "autoptd/subject/module.py",
        "tests/trace/test_wrappers.py",
        ("isinstance(module, nn.parallel.DistributedDataParallel)", "False"),
        ("if isinstance(module, wrapped):", "if False:"),
        ("if tensor is not None:", "if False:"),
    ),
)
