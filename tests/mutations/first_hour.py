"""Of what a new user does wrong: files that do not run, empty batches, lists, keywords that torch has."""

from __future__ import annotations

from tests.mutations import Mutation

MODELS, MODEL_TESTS, BAD = (
    "autoptd/wings/cli/models.py",
    "tests/wings/cli/test_models.py -k fails_while",
    "tests/test_bad_input.py",
)
PAD = "autoptd/runtime/step/pad_batch.py"
CLIP = "tests/hostile/test_torch_clip.py -k finite"

CALL, CALL_TESTS = "autoptd/runtime/checks/call.py", "tests/runtime/checks/test_call.py -k gradient"

MUTATIONS = (
    Mutation(CALL, "elif leaf.requires_grad and", "elif leaf.is_leaf and leaf.requires_grad and", CALL_TESTS),
    Mutation(CALL, 'leaf.requires_grad and call == "step"', "leaf.requires_grad", CALL_TESTS),
    Mutation(
        MODELS,
        "_import(str(path), lambda: spec",
        "(lambda _, load: load())(str(path), lambda: spec",
        MODEL_TESTS,
    ),
    Mutation(MODELS, 'f"{name}.".startswith(f"{error.name}.")', "True", MODEL_TESTS),
    Mutation(
        MODELS,
        '    except Exception as error:\n        fact = f"transformers cannot',
        '    except ValueError as error:\n        fact = f"transformers cannot',
        MODEL_TESTS,
    ),
    Mutation("autoptd/compiler/batch.py", "or 0 in leaves[batched[0]].shape[1:]", "", f"{BAD} -k empty"),
    Mutation(
        "autoptd/compiler/batch.py", "if not (sum(counts) if counts else total) or", "if", f"{BAD} -k empty"
    ),
    Mutation(PAD, 'longer if length else "a batch of at least one token"', "longer", f"{BAD} -k empty"),
    Mutation(PAD, "at least one row, and at most", "at most", f"{BAD} -k empty"),
    Mutation(
        "autoptd/runtime/step/microbatches.py",
        "if is_list and len(args[0])",
        "if is_list and 0 * len(args[0])",
        f"{BAD} -k list",
    ),
    Mutation("autoptd/model/updates.py", "        if error_if_nonfinite:\n", "        if False:\n", CLIP),
)
