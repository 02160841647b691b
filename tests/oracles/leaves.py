"""What the oracles share: wide numbers, a walk over arrays, a choice of arrays."""

from collections.abc import Callable

import numpy as np

Params = dict[str, np.ndarray]
Steps = list[Params]


def wide(tree: Params) -> Params:
    """Every array in float64 or complex128: the oracle's own rounding is no matter."""
    return {
        path: np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
        for path, x in tree.items()
    }


def each(params: Params, grads: Steps, leaf: Callable) -> Steps:
    """A rule on each array alone: `leaf(path, x, gs)` gives all its values in turn."""
    grads = [wide(g) for g in grads]
    values = {
        path: list(leaf(path, x, [g[path] for g in grads]))
        for path, x in wide(params).items()
    }
    return [
        {path: xs[step] for path, xs in values.items()} for step in range(len(grads))
    ]


def abs_sq(g):
    return np.abs(g) ** 2


def norm(x):
    return np.sqrt(np.sum(abs_sq(x)))


def rms(x):
    return np.sqrt(np.mean(abs_sq(x)))


def chosen(where, path, x) -> bool:
    """Whether `where`, names of arrays or a function of (path, array), means this."""
    if where is None:
        return True
    if callable(where):
        return where(path, x)
    return path in ([where] if isinstance(where, str) else where)
