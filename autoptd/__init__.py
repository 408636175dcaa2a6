"""Write the model for one device; AutoPTD trains it on any (t, p, d).

pm = autoptd.parallelize(model, t=2, p=2, d=2, example_inputs=(x, y))
opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
loss = pm.step(*pm.local_batch(x, y)); opt.step(); opt.zero_grad()
"""

from autoptd.api import Machine, ParallelModel, Program, compile, parallelize, verify
from autoptd.diff import diff
from autoptd.errors import AutoptdError, InternalError, PlanError, RuntimeFault, TraceError
from autoptd.passes import register_rule

__all__ = [
    "AutoptdError",
    "InternalError",
    "Machine",
    "ParallelModel",
    "PlanError",
    "Program",
    "RuntimeFault",
    "TraceError",
    "compile",
    "diff",
    "parallelize",
    "register_rule",
    "verify",
]
