"""Groups of slots by path, whatever the container, called or not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close

import optimjax as oj


def test_a_label_tree_or_model_that_is_callable_is_never_called():
    """A model with `__call__` must not be mistaken for a function of paths."""
    calls = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Callable:
        w: jax.Array

        def __call__(self, *args):
            calls.append(args)
            raise AssertionError("called")

    model = Callable(jnp.ones(2))
    rule = oj.Partition({"x": oj.SGD(0.5)}, {"w": "x"})
    state = oj.setup(rule, model)
    state, new = oj.update(state, model, Callable(jnp.ones(2)))
    close(new.w, np.full(2, 0.5))
    step = oj.make_step(lambda m: jnp.sum(m.w))
    step(state, model)
    with pytest.raises(TypeError, match="label"):
        oj.Partition({"x": oj.SGD(0.5)}, Callable("x"))
    with pytest.raises(TypeError, match="trainable"):
        oj.setup(oj.SGD(0.5), model, trainable=Callable(True))
    with pytest.raises(TypeError, match="expected a glob"):
        oj.freeze(state, Callable(True))
    assert not calls


def containers():
    import equinox as eqx
    import flax.core
    from flax import nnx

    class Module(eqx.Module):
        enc: jax.Array
        head: jax.Array

    leaves = {"enc": jnp.ones(1), "head": jnp.ones(1)}
    return {
        "dict": leaves,
        "frozen dict": flax.core.FrozenDict(leaves),
        "state": nnx.State({k: nnx.Param(v) for k, v in leaves.items()}),
        "module": Module(**leaves),
    }


@pytest.mark.parametrize("name", ["dict", "frozen dict", "state", "module"])
def test_groups_by_path_do_not_depend_on_the_container(name):
    """A dict of groups must fit a FrozenDict, an nnx State or an Equinox module."""
    model = containers()[name]
    groups = {"slow": oj.SGD(0.25), "fast": oj.SGD(0.5)}
    for labels in (
        {"enc*": "slow", "*": "fast"},
        lambda path, leaf: "slow" if path.startswith("enc") else "fast",
    ):
        rule = oj.Partition(groups, labels)
        _, new = oj.update(oj.setup(rule, model), model, model)
        assert jax.tree.structure(new) == jax.tree.structure(model)
        close(jax.tree.leaves(new), [np.full(1, 0.75), np.full(1, 0.5)])
