"""What the server of `tests/forks.py` imports last: it compiles a small model, in two dtypes, and what else is compiled is
traced once.

What torch imports only when it traces, and makes once per process, takes most of a second; here it is there before the fork.
"""

from __future__ import annotations

import gc

import autoptd
from autoptd import trace
from tests import traces
from tests.parity.models import batch, gpt

trace.capture, trace.capture_again = traces.capture, traces.capture_again
# As `tests/conftest.py` has it.
gc.set_threshold(20_000, 20, 50)
autoptd.compile(gpt(2).double(), t=2, example_inputs=batch(8))
autoptd.compile(gpt(2), t=2, example_inputs=batch(4))
