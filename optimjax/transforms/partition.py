"""Different rules for different parts of a model."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax

from optimjax.hyper import PerPath, where_field
from optimjax.nested import scaling
from optimjax.paths import Path, Slots, Where, complain, with_paths
from optimjax.rule import Part, Places, Rule, rule
from optimjax.treewide import PyTree, spread

__all__ = ["Frozen", "Masked", "Partition"]


@rule
class Partition(Rule):
    """Slots in groups, each group with its own rule.

        steps[group] = rules[group].apply(params[group], grads[group])

    Args:
        rules: `{label: rule}`.
        labels: which group a slot belongs to: `{glob: label}`, where the first glob
            that matches decides and `*` is for all the others, or a function of
            (path, leaf) that returns a label.
    State: `{label: the state of its rule}`.
    Raises: TypeError if `labels` is neither (a tree of labels is neither taken nor
        called). By `setup`, ValueError for a label without a rule, a slot without a
        label, a glob that matches nothing, and an array whose places have different
        labels.

    >>> import jax.numpy as jnp
    >>> from optimjax import SGD
    >>> x = {"body": jnp.array([1.0]), "head": jnp.array([1.0])}
    >>> groups = {"slow": SGD(0.1), "fast": SGD(0.5)}
    >>> rule = Partition(groups, {"body": "slow", "*": "fast"})
    >>> _, steps = rule.apply(rule.init(x), x, x)
    >>> steps["body"], steps["head"]
    (Array([0.1], dtype=float32), Array([0.5], dtype=float32))
    """

    rules: dict[Any, Rule]
    labels: Any

    def __post_init__(self) -> None:
        try:
            sorted(self.rules)
        except TypeError:
            raise TypeError(
                f"{type(self).__name__}: the labels {list(self.rules)} are of several "
                "types, expected one, which can be sorted: JAX sorts keys."
            ) from None
        super().__post_init__()
        labels = self.labels
        if not isinstance(labels, PerPath):
            of_leaf = callable(labels) and jax.tree_util.all_leaves([labels])
            if not (of_leaf or isinstance(labels, Mapping)):
                raise TypeError(
                    f"Partition: labels is a {type(labels).__name__}, expected a dict "
                    "{glob: label} or a function of (path, leaf). A tree of labels is "
                    "not taken: write it as a function."
                )
            object.__setattr__(self, "labels", PerPath(labels))

        rules = self.rules.values()
        if any(map(scaling, rules)) and sum(not each.freezes for each in rules) > 1:
            raise ValueError(
                f"{type(self).__name__}: LossScaling in one group, but the loss is "
                "that of all. Put it around the whole."
            )

    def _check(self, labels: Mapping[Path, Any]) -> None:
        problems = {
            path: f"label {label!r} has no rule"
            for path, label in labels.items()
            if label not in self.rules
        }
        if problems:
            known = f"The labels are {', '.join(map(repr, self.rules))}."
            raise ValueError(complain(type(self).__name__, problems, known))

    def _label(self, path: Path, leaf: Any) -> str:
        label = self.labels(path, leaf, type(self).__name__)
        self._check({path: label})
        return label

    def bind(self, places: Places) -> Self:
        table = self.labels.bind(
            places, type(self).__name__, lambda label: self.rules.get(label, label)
        )
        self._check(table)
        rules = {
            label: inner.bind({s: places[s] for s in table if table[s] == label})
            for label, inner in self.rules.items()
        }
        return self.with_fields(rules=rules, labels=PerPath(table))

    def _split(self, named: Mapping[Path, Any], params: Mapping[Path, Any]) -> Any:
        groups: dict[str, Slots] = {label: Slots() for label in self.rules}
        for path, x in named.items():
            groups[self._label(path, params[path])][path] = x
        return groups

    def init(self, params: PyTree) -> dict[str, PyTree]:
        named = with_paths(params)
        groups = self._split(named, named)
        return {label: r.init(groups[label]) for label, r in self.rules.items()}

    def apply(
        self, state: dict[str, PyTree], params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[dict[str, PyTree], PyTree]:
        named = with_paths(params)
        xs = self._split(named, named)
        given = with_paths(spread(params, grads))
        gs = self._split(given, named)
        new, steps = {}, {}
        for label, inner in self.rules.items():
            new[label], made = inner.apply(
                state[label], xs[label], spread(xs[label], gs[label]), **context
            )
            steps.update(made)
        structure = jax.tree.structure(params)
        return new, structure.unflatten([steps[path] for path in named])

    def descend(
        self, state: dict[str, PyTree], params: Slots, grads: Slots, **context: Any
    ) -> tuple[dict[str, PyTree], Slots]:
        """Each group as its rule would alone, in a compiled loop where it has one."""
        xs, gs = self._split(params, params), self._split(grads, params)
        new, moved = {}, Slots(params)
        for label, inner in self.rules.items():
            new[label], group = inner.descend(
                state[label], xs[label], gs[label], **context
            )
            moved.update(group)
        return new, moved

    def parts(self, state: PyTree, slots: Any) -> list[Part]:
        # Labels of a rule that `setup` has not bound may ask for the leaves.
        given = isinstance(slots, Mapping)
        leaves = slots if given else dict.fromkeys(slots)
        groups = self._split(leaves, leaves)
        return [
            (inner, state[label], groups[label] if given else list(groups[label]))
            for label, inner in self.rules.items()
        ]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(rules=dict(zip(self.rules, rules, strict=True)))

    def __repr__(self) -> str:
        return f"Partition({self.rules!r}, {self.labels!r})"


@rule
class Frozen(Rule):
    """Slots that stay as they are; for a group of a `Partition`.

        step = None

    `setup` freezes them as `freeze` does: no gradient is computed, no memory taken, and
    they weigh in no global norm. `thaw` does not move them, for this rule never steps.

    State: nothing.

    >>> import jax.numpy as jnp
    >>> import optimjax as oj
    >>> groups = {"train": oj.SGD(0.1), "keep": Frozen()}
    >>> rule = oj.Partition(groups, {"head": "train", "*": "keep"})
    >>> oj.setup(rule, {"body": jnp.ones(2), "head": jnp.ones(2)}).frozen
    ('body',)
    """

    freezes: ClassVar[bool] = True

    def init(self, params: PyTree) -> None:
        return None

    def apply(
        self, state: None, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[None, PyTree]:
        return None, jax.tree.map(lambda x: None, params)


@rule
class Masked(Partition):
    """A rule for some of the slots, another for those outside.

        steps = inner(g) where `where` says so, outside(g) elsewhere

    By default those outside are frozen. To let gradients through to the next rule of a
    `Chain`, which is what optax's `masked` does, say `outside=Identity()`.

    Args:
        inner: the rule.
        where: a glob on paths, several, or a function of (path, leaf).
        outside: the rule for all other slots.
    State: `{True: the state of inner, False: that of outside}`.
    Raises: TypeError for another kind of `where`.

    >>> import jax.numpy as jnp
    >>> import optimjax as oj
    >>> sign = Masked(oj.SignSGD(1.0), "w", outside=oj.Identity())
    >>> rule = oj.Chain(sign, oj.SGD(0.1))
    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> _, steps = rule.apply(rule.init(x), x, x)
    >>> steps["w"], steps["b"]
    (Array([ 0.1, -0.1], dtype=float32), Array([0.3], dtype=float32))
    """

    def __init__(self, inner: Rule, where: Where, outside: Rule | None = None):
        inside = where_field(where, "Masked: where") or PerPath({"*": True})
        object.__setattr__(self, "rules", {True: inner, False: outside or Frozen()})
        object.__setattr__(self, "labels", inside)
        self.__post_init__()

    def __repr__(self) -> str:
        inner, outside = self.rules[True], self.rules[False]
        return f"Masked({inner!r}, {self.labels!r}, outside={outside!r})"
