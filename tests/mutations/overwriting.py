"""Parameters that are overwritten while a checkpoint is copied, or by a load that does not end."""

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/model/run.py",
        "            release()\n",
        "            pass\n",
        "tests/runtime/checkpoint/test_checkpointer.py -k overwrites_the_state",
    ),
    Mutation(
        "autoptd/model/run.py",
        'self._unusable = what and f"{what} did not end"',
        'self._unusable = ""',
        "tests/runtime/checkpoint/test_bad_input.py",
    ),
)
