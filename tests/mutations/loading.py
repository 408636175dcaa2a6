"""How the public names are loaded."""

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/__init__.py",
        "        with paused_collection():\n",
        "        if True:\n",
        "tests/test_imports.py -k public_names",
    ),
)
