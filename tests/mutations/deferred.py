"""What a deferred model draws."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/subject/initial/replay.py",
        'hashlib.shake_256(key.encode()).digest(4 * MERSENNE_WORDS), dtype="<u4")',
        'hashlib.blake2b(key.encode(), digest_size=4).digest() * MERSENNE_WORDS, dtype="<u4")',
        "tests/subject/initial/test_replay.py",
    ),
)
