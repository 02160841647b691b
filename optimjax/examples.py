"""Gradients of each example apart: which rule wants them, and what shapes they have."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimjax.layout import Layout
from optimjax.nested import Chain
from optimjax.paths import Path, Slots, complain, with_paths
from optimjax.rule import Rule
from optimjax.treewide import PyTree

__all__ = []

PER_EXAMPLE = (
    "Take the gradients by make_step(loss, per_example=True), or by vmap over examples."
)


def per_example(rule: Rule) -> bool:
    """Whether the first rule to be shown gradients takes those of each example."""
    while isinstance(rule, Chain) and rule.rules:
        rule = rule.rules[0]
    return rule.per_example


def count_examples(
    function: str, params: Mapping[Path, Any], grads: Mapping[Path, Any]
) -> int:
    """How many examples there are gradients of, one each on the first axis.

    Raises: ValueError if a gradient has not that axis, or their numbers differ.
    """
    shapes = {path: jnp.shape(g) for path, g in grads.items()}
    wrong = {}
    for path, shape in shapes.items():
        right = jnp.shape(params[path])
        if shape[1:] != right or len(shape) != len(right) + 1:
            expected = ", ".join(["examples", *map(str, right)])
            wrong[path] = f"gradient has shape {shape}, expected ({expected})"
    if not wrong and len({shape[0] for shape in shapes.values()}) > 1:
        wrong = {p: f"gradients of {shape[0]} examples" for p, shape in shapes.items()}
    if wrong:
        raise ValueError(complain(function, wrong, PER_EXAMPLE))
    (examples,) = {shape[0] for shape in shapes.values()}
    if examples == 0:
        raise ValueError(f"{function}: no examples, expected one at least.")
    return examples


def check_batch(batch: tuple[Any, ...]) -> None:
    """ValueError unless all arrays of a batch have the same number of examples."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or not any(shapes[0][:1]):
        raise ValueError(
            f"step: per_example, and a batch of shapes {shapes}, expected a first axis "
            "of one length, at least 1, which numbers the examples."
        )


def sums_of_examples(layout: Layout, leaves: list[Any], grads: PyTree) -> Slots:
    """`layout.accumulate` for gradients with a first axis, which numbers examples."""
    given = {p: np.shape(g) for p, g in with_paths(grads).items()}
    sizes = {shape[:1] for shape in given.values()}
    if len(sizes) > 1 or () in sizes:
        what = "expected a first axis of one length, which numbers the examples"
        shapes = {p: f"gradient has shape {each}, {what}" for p, each in given.items()}
        raise ValueError(complain("update", shapes, PER_EXAMPLE))
    if not given:
        return layout.accumulate(leaves, grads)
    return jax.vmap(lambda grads: layout.accumulate(leaves, grads))(grads)
