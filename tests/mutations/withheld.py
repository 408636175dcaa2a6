"""Parameters that are withheld while they are gathered, and the counting of gradients."""

from tests.mutations import Mutation

NAMES, TESTS = "autoptd/runtime/params/namespace.py", "tests/runtime/step/test_executor.py -k withheld"
GRADIENTS, COUNTED = "autoptd/runtime/params/gradients.py", "tests/runtime/params/test_gradients.py"

MUTATIONS = (
    Mutation(NAMES, "        self._wait()\n", "", TESTS),
    Mutation(NAMES, "() if self._is_withheld else self._places", "self._places", TESTS),
    Mutation(NAMES, "        self.give_back()\n        *path", "        *path", TESTS),
    Mutation(NAMES, "last if _is_attribute(last) else None, node", "last, node", TESTS),
    Mutation(
        GRADIENTS,
        "        if count < self._expected[name]:\n",
        "        if count <= self._expected[name]:\n",
        COUNTED,
    ),
    Mutation(
        "autoptd/runtime/params/grad_norm.py",
        "for name in [name for name in gradients if name not in params.plain]:",
        "for name in list[str]():",
        "tests/parity/test_hooks.py -k more_exact",
    ),
)
