"""Mutations of what sees a forward's writes to Python state."""

from tests.mutations import Mutation

TESTS, TALLY = "tests/trace/test_writes.py", "tests/trace/test_tally.py"
MUTATIONS = (
    Mutation(
        "autoptd/subject/contents.py",
        "if below is None or isinstance(below, torch.Tensor):",
        "if below is None:",
        "tests/trace/test_writes.py",
    ),
    # A read of a defaultdict makes what it lacks.
    Mutation("autoptd/trace/writes.py", 'hasattr(type(owner), "__missing__")', "False", TESTS),
    # An array is written to by its views.
    Mutation("autoptd/subject/contents.py", "        value = below\n", "        break\n", TESTS),
    # What only a record keeps alive is gone with the call.
    Mutation(
        "autoptd/trace/writes.py",
        "                while _drop(",
        "                while False and _drop(",
        TESTS,
    ),
    # Who refers to what is not seen of objects that the user froze.
    Mutation("autoptd/trace/writes.py", "gc.get_freeze_count() > 0", "False", TESTS),
    # Python's collector goes on between traces, and what is young before one is no longer.
    Mutation("autoptd/trace/writes.py", "        gc.collect(0)\n", "        pass\n", TESTS),
    # An object may hold more than its attributes.
    Mutation("autoptd/trace/sameness.py", "(each.args, ", "(", TESTS),
    Mutation("autoptd/trace/sameness.py", "    if _hides_something(one):\n        return False\n", "", TESTS),
    # A second call may fail for what the first one has left.
    Mutation(
        "autoptd/trace/watched.py",
        "    except Exception:\n        # It ran",
        "    except ImportError:\n        # It ran",
        TESTS,
    ),
    # What map is handed is called as well.
    Mutation(
        "autoptd/trace/calls.py",
        "elif isinstance(arg, (*BUILT_IN, partial, _lru_cache_wrapper)):",
        "elif False:",
        TESTS,
    ),
    # A number that a branch reads does not only log.
    Mutation(
        "autoptd/trace/tally.py",
        "        self.is_read = True\n",
        "        pass\n",
        TALLY,
    ),
    # Of a Python that nobody tried it on, no memory is read.
    Mutation("autoptd/trace/value_stack.py", "and version in TRIED", "", "tests/trace/test_value_stack.py"),
    # What print is handed as its file is written to.
    Mutation("autoptd/trace/calls.py", "isinstance(file, io.IOBase) and not", "False and not", TESTS),
    # The size of a cache says how often a forward ran.
    Mutation("autoptd/trace/calls.py", 'if name == "cache_info":', "if False:", TESTS),
    # Nothing of these has a dict that shows it.
    Mutation("autoptd/trace/writes.py", 'name == "__class__":', "False:", TESTS),
    Mutation("autoptd/trace/writes.py", "elif _is_of_c(owner, name):", "elif False:", TESTS),
    Mutation("autoptd/trace/calls.py", "elif name in SETS_OF_SLOTS and args:", "elif False:", TESTS),
    # Code that is run from a text is no import.
    Mutation("autoptd/trace/instructions.py", " and _is_importing(frame):", ":", TESTS),
    # Python's library keeps what the user's code hands it.
    Mutation(
        "autoptd/trace/users.py", '"inspect", "contextlib",', '"inspect", "contextlib", "threading",', TESTS
    ),
    Mutation("autoptd/trace/calls.py", "function.__name__ in SEEDS:", "False:", TESTS),
    # C asks for the class of a list where no stand-in sees it.
    Mutation("autoptd/trace/watched.py", "run((args, kwargs), note_reading)", "run((args, kwargs))", TALLY),
    # A method of a dict's is passed over where it only reads.
    Mutation("autoptd/trace/calls.py", " and function.__name__ in READS", "", "tests/trace/test_calls.py"),
    # A list has several names, and one in a tuple cannot be replaced there.
    Mutation("autoptd/trace/places.py", "        if not places:\n            return []\n", "", TALLY),
    # What is written to a terminal is nobody's state.
    Mutation("autoptd/trace/calls.py", " or _is_terminal(owner):", ":", TESTS),
)
