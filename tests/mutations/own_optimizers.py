"""Optimizer classes of the user's own: pieces that keep ndim, groups that constructors make, trials of shapes."""

from tests.mutations import Mutation

TESTS = "tests/runtime/params/test_own_optimizers.py"
MUTATIONS = (
    Mutation("autoptd/runtime/params/elementwise.py", "STARTS = (1.0, 1e-4)", "STARTS = (1.0,)", TESTS),
    Mutation("autoptd/runtime/params/elementwise.py", "without_first=True", "without_first=False", TESTS),
    Mutation(
        "autoptd/runtime/params/storage.py",
        "return flat.view(*[1] * (ndim - 1), -1) if ndim else flat.view(())",
        "return flat",
        TESTS,
    ),
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "        groups = names_in_groups(cls, keywords, optimizer, ranks, run, named_groups)\n",
        "        names_in_groups(cls, keywords, optimizer, ranks, run, named_groups)\n",
        TESTS,
    ),
    Mutation(
        "autoptd/runtime/params/optimizer.py", "for text in filter(None, findings):", "for text in ():", TESTS
    ),
    Mutation("autoptd/runtime/params/elementwise.py", "{**_copied(options), ", "{", TESTS),
    Mutation(
        "autoptd/runtime/params/elementwise.py",
        'found + ["constructor"] * ("__init__" in names)',
        "found",
        TESTS,
    ),
    Mutation("autoptd/runtime/params/shape_trial.py", "return calls[0] == calls[1]", "return True", TESTS),
    Mutation(
        "autoptd/runtime/params/shape_trial.py",
        "if place.get(name) != number:",
        "if name not in place:",
        TESTS,
    ),
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "        if hidden and all(x.grad is None for x, _ in hidden):\n            return\n",
        "",
        f"{TESTS} -k counts_once",
    ),
)
