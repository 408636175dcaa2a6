"""Settings of groups that differ between ranks; gradients that no update used, at a save or a load."""

from tests.mutations import Mutation

SETTINGS, GRADIENTS = (
    "tests/runtime/checks/test_settings.py",
    "tests/runtime/checkpoint/test_unused_gradients.py",
)
MUTATIONS = (
    Mutation("autoptd/runtime/checks/settings.py", "if not differing:", "if True:", SETTINGS),
    Mutation("autoptd/runtime/checks/settings.py", "or key in OF_SCHEDULERS ", "", SETTINGS),
    Mutation("autoptd/runtime/checks/settings.py", ".intersection(*everywhere)", "", SETTINGS),
    Mutation(
        "autoptd/runtime/checks/settings.py",
        "for _, count in found} - {None}) > 1",
        "for _, count in found}) < 0",
        SETTINGS,
    ),
    Mutation("autoptd/runtime/checks/settings.py", " if has_parameters else None", "", SETTINGS),
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "optimizer.updates += optimizer.is_stepping",
        "optimizer.updates += 1",
        SETTINGS,
    ),
    Mutation("autoptd/runtime/params/gradients.py", "self.params.is_update_due = True", "pass", GRADIENTS),
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "    params.hand_gradients()\n    params.is_update_due = False\n",
        "    params.hand_gradients()\n",
        GRADIENTS,
    ),
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "set_to_none)\n                params.is_update_due = False\n",
        "set_to_none)\n",
        GRADIENTS,
    ),
)
