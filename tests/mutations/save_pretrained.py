"""What `save_pretrained` writes."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/program/folder_format.py",
        "if name not in self.left_out] or [spec.name]",
        "if name not in self.left_out][:1] or [spec.name]",
        "tests/model/test_pretrained.py -k by_hand",
    ),
    Mutation(
        "autoptd/subject/match_folder.py",
        "if first[name] == first[source]}",
        "}",
        "tests/model/test_pretrained.py -k by_hand",
    ),
    Mutation(
        "autoptd/subject/match_folder.py",
        "model.get_expanded_tied_weights_keys(all_submodels=True)",
        "model.all_tied_weights_keys",
        "tests/model/test_pretrained.py -k by_hand",
    ),
)
