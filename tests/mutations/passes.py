"""What the verifiers of passes look at."""

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/passes/communicate.py",
        "if source.over(axis) != gives.over(axis):",
        "if False:",
        "tests/passes/solve/test_batch_types.py -k share",
    ),
    # A view would be as cheap in shards: the price is that of the operator that reads it.
    Mutation(
        "autoptd/passes/conversion_reasons.py",
        "operand, user = _used(source, reader)",
        "operand, user = source, reader",
        "tests/passes/test_conversion_reasons.py",
    ),
    # The second trace is rewritten like the first, or they are not compared.
    Mutation(
        "autoptd/passes/context.py",
        "return self.whole if self.found.whole is None else self.found.whole",
        "return self.whole",
        "tests/parity/test_shift.py",
    ),
)
