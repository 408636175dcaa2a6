"""Of what the command line does on a terminal, and of what it needs."""

from __future__ import annotations

from tests.mutations import Mutation

LIVE = "autoptd/wings/cli/live.py"
REQUEST = "autoptd/wings/cli/request.py"
SLOW = "autoptd/wings/reports/slow_ranks.py"

MUTATIONS = (
    Mutation(
        LIVE, "from typing import TextIO", "import tqdm\nfrom typing import TextIO", "tests/test_imports.py"
    ),
    Mutation(
        "autoptd/wings/cli/commands.py",
        'LIST if getattr(args, "list", False) else where',
        "where",
        "tests/wings/cli/test_parser.py",
    ),
    Mutation(LIVE, "[: self._columns - 1]", "", "tests/wings/cli/test_live.py"),
    Mutation(
        "autoptd/wings/cli/commands.py",
        "        check_request(args)\n",
        "",
        "tests/wings/cli/test_request.py",
    ),
    Mutation(REQUEST, "args.command not in BESIDES.get(name, ())", "True", "tests/wings/cli/test_request.py"),
    Mutation(REQUEST, 'if backend == "local":', "if True:", "tests/wings/cli/test_request.py"),
    Mutation(
        SLOW,
        "torch.get_num_threads() + 1",
        "torch.get_num_threads()",
        "tests/wings/reports/test_slow_ranks.py",
    ),
)
