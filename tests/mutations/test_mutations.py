from __future__ import annotations

from pathlib import Path

from tests.mutations import all_mutations

ROOT = Path(__file__).parents[2]


def test_every_mutation_changes_one_place_of_the_source_and_names_tests_that_exist() -> None:
    for mutation in all_mutations():
        assert (ROOT / mutation.file).read_text().count(mutation.before) == 1, mutation
        paths = [
            argument.split("::")[0] for argument in mutation.tests.split() if argument.startswith("tests/")
        ]
        assert paths, mutation
        assert all((ROOT / path).exists() for path in paths), mutation
