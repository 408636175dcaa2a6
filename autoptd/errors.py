"""The errors of AutoPTD: each names the site, the fact and the remedy.

`TraceError`     the model cannot be captured faithfully.
`PlanError`      the request cannot be met (sizes, keywords, operators, batch).
`RuntimeFault`   a rank failed or waited too long while a step ran.
`InternalError`  a promise of AutoPTD itself is broken: please report it.

    raise PlanError("example_inputs", "7 rows do not divide over d=2", "a multiple of 2 rows")
"""

from __future__ import annotations


class AutoptdError(Exception):
    """Base of all errors: `site` (where), `fact` (the problem), `remedy` (how to fix it)."""

    def __init__(self, site: str, fact: str, remedy: str) -> None:
        # A fact may end with the message of another library.
        super().__init__(f"{site}: {fact.removesuffix('.')}. Remedy: {remedy}.")
        self.site, self.fact, self.remedy = site, fact, remedy


class TraceError(AutoptdError):
    """The model cannot be captured as a graph that computes what the model computes."""


class PlanError(AutoptdError):
    """The request cannot be met; raised before any rank starts."""


class RuntimeFault(AutoptdError):
    """A rank failed, or waited longer than the timeout, while a step ran."""


class InternalError(AutoptdError):
    """A check on AutoPTD's own work failed: the program is not run."""

    def __init__(self, site: str, fact: str) -> None:
        super().__init__(site, fact, "this is a defect of AutoPTD, please report it with this message")


def a_type(value: object) -> str:
    """Return the name of a value's type with its article: "a Linear", "an int"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return "a" or "an" before a name, by its pronunciation: "a UNet", "an AdamW", "an SGD"."""
    is_spelled = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"{'an' if is_spelled or name[0] in 'aeioAEIO' else 'a'} {name}"
