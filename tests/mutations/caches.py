"""Of caches of functions, and of what a forward keeps."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/caches.py", "tests/trace/test_caches.py"

MUTATIONS = (
    Mutation("autoptd/trace/watched.py", "            if x._version:\n", "            if True:\n", TESTS),
    Mutation(FILE, " and any(x is not None for x in held_in(self._function))", "", TESTS),
    Mutation(FILE, "value.fget if isinstance(value, property) else value", "value", TESTS),
    Mutation(FILE, "self._count = self._misses() - begun", "self._count = self._misses()", TESTS),
    Mutation(
        FILE,
        "return self._function.cache_info().misses",
        "return self._function.cache_info().currsize",
        TESTS,
    ),
    Mutation(FILE, "return found[2 : place", "return found[1 : place", TESTS),
    Mutation(
        "autoptd/trace/calls.py", "(*BUILT_IN, partial, _lru_cache_wrapper)", "(*BUILT_IN, partial)", TESTS
    ),
    Mutation("autoptd/trace/watched.py", "        x.mul_(2)\n", "        x.mul_(1)\n", TESTS),
    Mutation("autoptd/trace/watched.py", "            x.mul_(0.5)\n", "            x.mul_(1)\n", TESTS),
    Mutation(
        "autoptd/trace/watched.py", "                kept.put_back()\n", "                pass\n", TESTS
    ),
)
