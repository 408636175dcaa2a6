"""Kinds of keywords, and a model that fails by itself."""

from __future__ import annotations

from tests.mutations import Mutation

KEYWORDS = "tests/test_keywords.py"

MUTATIONS = (
    Mutation(
        "autoptd/options/keyword.py",
        "setting.keyword.check(setting.name, value, setting.default)",
        "pass",
        KEYWORDS,
    ),
    # Records next to flat names.
    Mutation("autoptd/options/spelling.py", "            found |= said\n", "", "tests/test_options.py"),
    Mutation("autoptd/options/spelling.py", "    if old:\n", "    if False:\n", "tests/test_options.py"),
    Mutation("autoptd/options/keyword.py", "    check_plain(keywords)\n", "", KEYWORDS),
    Mutation("autoptd/runtime/step/launch.py", "    check_device(options.device)\n", "", KEYWORDS),
    Mutation("autoptd/options/options.py", "MAX_RANKS = 2**20", "MAX_RANKS = 10**40", KEYWORDS),
    Mutation(
        "autoptd/elsewhere.py",
        'RECOMPUTE = \'recompute="full"',
        'RECOMPUTE = \'recomputed="full"',
        KEYWORDS,
    ),
    Mutation("autoptd/compiler/batch.py", "if cause is not None and (", "if cause is None and (", KEYWORDS),
    Mutation("autoptd/trace/own_failure.py", "        kept.put_back()\n", "        pass\n", KEYWORDS),
)
