"""Of the rows of a step, and of the workers that read them."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/model/batches.py",
        "while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:",
        "while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent != parent:",
        "tests/model/test_batches.py::test_a_worker_ends_when_its_own_rank_ends_it",
    ),
)
