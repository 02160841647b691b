"""Work outside of `jit` grows with the number of leaves, and no faster."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj


def timed(function, *args):
    """The better of two processor times of a call, in seconds: others may be busy."""
    best = np.inf
    for _ in range(2):
        start = time.process_time()
        function(*args)
        best = min(best, time.process_time() - start)
    return best


def many(count):
    w = jnp.zeros(2)
    leaves = {f"w{i}": np.zeros(2, np.float32) for i in range(count)}
    return {"a": leaves, "z": [w] * (count // 10)}


@functools.cache
def trained(count):
    model = many(count)
    return oj.setup(oj.Adam(0.1), model), model


WORK = {
    "setup": lambda s, m: oj.setup(oj.Adam(0.1), m),
    "setup by path": lambda s, m: oj.setup(oj.Adam({"a/*": 0.1, "*": 0.2}), m),
    "setup by name": lambda s, m: oj.setup(oj.SGD(dict.fromkeys(s.slots, 0.1)), m),
    "groups by name": lambda s, m: oj.setup(
        oj.Partition({"x": oj.SGD(0.1)}, dict.fromkeys(s.slots, "x")), m
    ),
    "freeze": lambda s, m: oj.freeze(s, "a/*"),
    "thaw": lambda s, m: oj.thaw(s, lambda path, leaf: True),
    "adjust": lambda s, m: oj.adjust(s, learning_rate=0.1),
    "adjust some": lambda s, m: oj.adjust(s, where="a/*1", learning_rate=0.1),
    "adjust again": lambda s, m: oj.adjust(
        oj.adjust(s, where="a/*1", learning_rate=0.1), where="a/*2", learning_rate=0.3
    ),
    "freeze names": lambda s, m: oj.freeze(s, list(s.slots)),
    "align": lambda s, m: oj.align(s, {"a": m["a"], "z": None}),
    "summary": lambda s, m: oj.summary(s),
    "repr": lambda s, m: repr(s),
    "hash": lambda s, m: (hash(s.ties), s.ties == oj.find_ties(m)),
    "checkpoint": lambda s, m: oj.state_from_dict(s, oj.state_to_dict(s)),
    "transfer": lambda s, m: oj.transfer(s, m),
    "trainables": lambda s, m: oj.trainables(m),
    "hyperparams": lambda s, m: oj.hyperparams(s),
    "trace": lambda s, m: jax.eval_shape(lambda s, m: oj.update(s, m, m)[0], s, m),
}


@pytest.mark.parametrize("name", WORK)
def test_work_grows_with_the_number_of_leaves_and_not_faster(name):
    """Models of thousands of leaves exist; nothing may look at pairs of them."""
    short, long = (timed(WORK[name], *trained(count)) for count in (200, 2000))
    assert long < max(40 * short, 0.1), f"{short:.4f} s, then {long:.4f} s"


def test_setup_of_2000_leaves_takes_less_than_a_second():
    """Set-up runs before anything is seen of a run; nobody waits for it."""
    model = {f"w{i}": jnp.zeros(2) + i for i in range(2000)}
    oj.setup(oj.Adam(0.1), {"w": jnp.zeros(2)})
    assert timed(lambda: oj.setup(oj.Adam(0.1), model)) < 1.0
