"""Rules that hold rules: one after another, or one around another."""

from collections.abc import Iterable
from typing import Any, Self

import jax

from optimjax.arrays import (
    widen,
)
from optimjax.paths import Path
from optimjax.rule import Part, Rule, is_rule, rule
from optimjax.treewide import PyTree, spread, steps_like

__all__ = ["Chain", "Wrapper"]


@rule
class Chain(Rule):
    """One rule after another: each one's steps are the next one's gradients.

        s1, steps = first.apply(s1, params, grads)
        s2, steps = second.apply(s2, params, steps)

    Args:
        *rules: one or more rules, in the order in which they act.
    State: a tuple, one rule's state each.
    Raises: TypeError if an argument is not a rule.

    >>> from optimjax import SGD, ClipByGlobalNorm
    >>> Chain(ClipByGlobalNorm(1.0), SGD(0.1)).rules[0]
    ClipByGlobalNorm(max_norm=1)
    """

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule):
        for each in rules:
            if not is_rule(each):
                raise TypeError(f"Chain: {each!r}, expected rules: Chain(a, b, ...).")
        object.__setattr__(self, "rules", rules)
        self.__post_init__()

    def init(self, params: PyTree) -> tuple[PyTree, ...]:
        return tuple(inner.init(params) for inner in self.rules)

    def apply(
        self, state: tuple[PyTree, ...], params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[tuple[PyTree, ...], PyTree]:
        # Between the rules steps are kept wide, and rounded once at the end.
        wide = jax.tree.map(widen, params)
        steps, new = spread(params, grads), []
        for inner, own in zip(self.rules, state, strict=True):
            own, steps = inner.apply(own, wide, steps, **context)
            new.append(own)
        return tuple(new), steps_like(params, steps)

    def parts(self, state: PyTree, slots: list[Path]) -> list[Part]:
        return [(r, s, slots) for r, s in zip(self.rules, state, strict=True)]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(rules=tuple(rules))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"


@rule
class Wrapper(Rule):
    """A rule around another one, `inner`; its state has an `inner` too."""

    inner: Rule

    def parts(self, state: PyTree, slots: list[Path]) -> list[Part]:
        return [(self.inner, state.inner, slots)]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(inner=rules[0])


def every_rule(rule: Rule) -> list[Rule]:
    """The rule and all the rules inside it."""
    held = [vars(rule)[n] for n, kind in rule._kinds.items() if kind == "rule"]
    inner = [r for r in jax.tree.leaves(held, is_leaf=is_rule) if is_rule(r)]
    return [rule, *(r for each in inner for r in every_rule(each))]


def walk(
    rule: Rule, state: PyTree, slots: list[Path]
) -> Iterable[tuple[Rule, PyTree, list[Path]]]:
    """A rule and all the rules inside it, each with its state and its slots."""
    yield rule, state, slots
    for part in rule.parts(state, slots):
        yield from walk(*part)
