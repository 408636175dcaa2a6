"""Of what the command line does on a terminal, and of what it needs."""

from __future__ import annotations

from tests.mutations import Mutation

LIVE = "autoptd/cli/live.py"

MUTATIONS = (
    Mutation(
        LIVE, "from typing import TextIO", "import tqdm\nfrom typing import TextIO", "tests/test_imports.py"
    ),
    Mutation(LIVE, "[: self._columns - 1]", "", "tests/cli/test_live.py"),
)
