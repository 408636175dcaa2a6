"""Clipping by the p-norm of all gradients, and by value."""

from tests.mutations import Mutation

NORM, CALL, TESTS = (
    "autoptd/runtime/params/grad_norm.py",
    "autoptd/model/updates.py",
    "tests/runtime/params/test_gradients.py",
)

MUTATIONS = (
    Mutation(NORM, 'all_reduce(both, SITE, op="max")', "all_reduce(both, SITE)", TESTS),
    Mutation(NORM, "torch.where(is_nan > 0, torch.nan, size)", "size", TESTS),
    Mutation(NORM, "total.pow(1 / p)", "total.pow(1 / 2)", TESTS),
    Mutation(NORM, "norms_of(tensors, device, p).pow(p)", "norms_of(tensors, device, p).pow(2)", TESTS),
    Mutation(CALL, "and p in (1, 2, inf):", "and p:", "tests/parity/test_fp16.py"),
    Mutation(
        "autoptd/runtime/params/loss_scale.py",
        "norm if self._norm is None else self._norm + norm",
        "norm",
        "tests/parity/test_fp16.py -k value",
    ),
    Mutation(
        CALL,
        'self._run.loss_scale.saw(ranks.run("clip_grad_value_"',
        'print(ranks.run("clip_grad_value_"',
        "tests/parity/test_fp16.py -k value",
    ),
    Mutation(
        NORM,
        "torch._foreach_clamp_min_(same, -value)",
        "torch._foreach_clamp_min_(same, 0.0)",
        "tests/hostile/test_torch_clip.py -k by_value",
    ),
)
