"""`check_rule`: the conformance suite that the author of a rule runs.

Every promise that `update` makes for a rule, tried on small models: a rule that passes
can be jitted, scanned, swept, donated, tied, skipped and kept in any precision.
"""

from collections.abc import Callable
from typing import Any

from optimjax.rule import Rule, is_rule
from optimjax.testing.checks import CHECKS
from optimjax.testing.subject import Subject, quadratic
from optimjax.treewide import PyTree

__all__ = ["RuleError", "check_rule"]


class RuleError(AssertionError):
    """What `check_rule` raises: which promises a rule breaks, and how."""


def check_rule(
    rule: Rule, *, problem: Callable[[PyTree], Any] | None = None, verbose: bool = False
) -> None:
    """Try every promise of a rule; return None if all of them hold.

    Checked: steps go downhill (uphill for a rule that says `maximize`); purity; the
    state is a fixed point of `update` (structure, shapes, dtypes, weak types), for
    gradients of other float dtypes too; jit, scan and vmap over the hyperparameters
    give what plain calls give; no new trace when a value changes; schedules; tied
    places are one slot with summed gradients; a skipped or frozen slot stays bit for
    bit; donation; bf16, f16, f32 and f64; complex parameters, where `complex_ok`; empty
    and scalar arrays; a full step counter. Takes some seconds, most of them to compile.

    Args:
        rule: an instance, with the hyperparameters that are to be tried. It is tried
            on models of several paths: write choices by path as functions.
        problem: a loss, function of a dict of arrays, of which `value=` and `value_fn=`
            are taken for rules that need them; None for a quadratic.
        verbose: print the name of each check.
    Raises: RuleError that lists the checks that failed, and how.

    >>> import optimjax as oj
    >>> from optimjax import testing
    >>> testing.check_rule(oj.SGD(0.1, momentum=0.9))
    """
    if not is_rule(rule):
        raise TypeError(f"check_rule: a {type(rule).__name__}, expected a rule.")
    subject = Subject(rule, problem or quadratic)
    failures: dict[str, list[str]] = {}
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        if verbose:
            print(name)
        try:
            check(subject)
        except Exception as error:
            how = str(error).strip() or repr(error)
            if not isinstance(error, AssertionError):
                how = f"{type(error).__name__}: {how}"
            promise = f"* {name} ({str(check.__doc__).strip()})"
            failures.setdefault(how, []).append(promise)
    if failures:
        raise RuleError(
            f"{rule!r}: {sum(map(len, failures.values()))} of {len(CHECKS)} checks "
            "failed.\n"
            + "\n".join(
                "\n".join(who) + f":\n    {how}" for how, who in failures.items()
            )
        )
