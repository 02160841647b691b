"""The rule on trial: the models, gradients and steps on which it is tried."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from optimjax.arrays import compute_dtype, widen
from optimjax.examples import per_example
from optimjax.nested import every_rule
from optimjax.rule import Rule
from optimjax.state import State
from optimjax.training import setup, update
from optimjax.treewide import PyTree

__all__ = []

STEPS = 4


def quadratic(params: PyTree) -> Any:
    """A loss with a curvature and a minimum of its own for each number."""
    total = jnp.zeros((), jnp.float32)
    for i, x in enumerate(jax.tree.leaves(params)):
        scale = 0.5 + i + jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) / 7
        wide = x.astype(compute_dtype(x.dtype))
        distance = jnp.abs(wide - 0.3).astype(jnp.float32)
        total = total + jnp.sum(scale * distance**2)
    return total


@dataclasses.dataclass(frozen=True)
class Subject:
    """The rule on trial, and what it is tried on."""

    rule: Rule
    problem: Callable[[PyTree], Any]

    @property
    def context_needed(self) -> bool:
        return any(rule.needs for rule in every_rule(self.rule))

    @property
    def derives(self) -> bool:
        """Whether the rule evaluates the loss, and may differentiate it."""
        return any("value_fn" in rule.needs for rule in every_rule(self.rule))

    @property
    def state_dtype_chosen(self) -> bool:
        return any(getattr(rule, "state_dtype", None) for rule in every_rule(self.rule))

    def rtol(self, usual: float) -> float:
        """A tolerance between dtypes: a state of 16 bits rounds at every step."""
        return max(usual, 3e-2) if self.state_dtype_chosen else usual

    def model(self, dtype: Any = jnp.float32, seed: int = 0) -> dict[str, Any]:
        """A model of two shapes; its numbers are exact in bf16, and none is special."""
        rng = np.random.default_rng(seed)

        def array(*shape: int) -> Any:
            coarse = rng.integers(-23, 23, shape) / 32 + 1 / 64
            return jnp.asarray(coarse, dtype)

        return {"w": array(3, 2), "b": array(4)}

    def grads(self, model: PyTree, seed: int) -> PyTree:
        """Gradients that change sign from step to step, exact in bf16."""
        if per_example(self.rule):
            parts = [self._grads(model, seed + i) for i in (0, 50)]
            return jax.tree.map(lambda *g: jnp.stack(g), *parts)
        return self._grads(model, seed)

    def _grads(self, model: PyTree, seed: int) -> PyTree:
        if self.context_needed:
            # Of the wide model: in 16 bits the gradients themselves would be rounded.
            return jax.grad(self.problem)(jax.tree.map(widen, model))
        rng = np.random.default_rng(100 + seed)

        def one(x: Any) -> Any:
            g = rng.integers(-31, 31, x.shape) / 16 + 1 / 32
            return jnp.asarray(g, x.dtype)

        return jax.tree.map(one, model)

    def of_examples(self, grads: PyTree) -> PyTree:
        """The gradients of a batch of one example, for a rule that wants such."""
        if not per_example(self.rule):
            return grads
        return jax.tree.map(lambda g: g[None], grads)

    def context(self, model: PyTree, problem: Any = None) -> dict[str, Any]:
        """What `make_step` gives to every rule beside the gradients."""
        fn = problem or self.problem
        return {"value": fn(model), "value_fn": fn}

    def update(self, state: State, model: PyTree, grads: PyTree) -> Any:
        return update(state, model, grads, **self.context(model))

    @cached_property
    def step(self) -> Any:
        """`update`, compiled."""
        return jax.jit(self.update)

    def run(
        self, model: PyTree, state: State | None = None, steps: int = STEPS
    ) -> tuple[State, PyTree]:
        """A few compiled steps."""
        start = setup(self.rule, model) if state is None else state
        return self._run(start, model, steps)

    def _run(self, state: State, model: PyTree, steps: int) -> tuple[State, PyTree]:
        for i in range(steps):
            state, model = self.step(state, model, self.grads(model, i))
        return state, model


def same_kind(before: PyTree, after: PyTree, what: str) -> None:
    """Same structure, shapes, dtypes and weak types."""

    def kind(x: Any) -> tuple[Any, ...]:
        return x.shape, x.dtype.name, getattr(x, "weak_type", False)

    old, new = jax.tree.structure(before), jax.tree.structure(after)
    assert old == new, f"{what} had structure {old}, and then {new}"
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    for (keys, a), b in pairs:
        path = jax.tree_util.keystr(keys)
        assert kind(a) == kind(b), f"{what}{path} was {kind(a)}, and then {kind(b)}"


def close(a: PyTree, b: PyTree, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    chex.assert_trees_all_close(
        jax.tree.map(np.asarray, a), jax.tree.map(np.asarray, b), rtol=rtol, atol=atol
    )


def identical(a: PyTree, b: PyTree) -> None:
    """Bit for bit; NaNs are equal if their bits are."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"{x} became {y}"
