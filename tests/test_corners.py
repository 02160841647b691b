"""Corners in which names, ties and constants can be taken for others."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj


def test_a_branch_that_looks_like_a_glob_is_taken_at_its_word():
    model = {"a[b]": {"x": jnp.ones(2)}, "ab": {"x": jnp.ones(2)}}
    state = oj.setup(oj.SGD(0.1), model)
    assert oj.freeze(state, "a[b]").frozen == ("a[b]/x",)
    assert oj.freeze(state, ["a[b]", "ab"]).frozen == ("a[b]/x", "ab/x")


def test_transforms_of_transforms_are_values():
    """Two equal set-ups are one program, a state can be saved, places one object."""
    w = jnp.arange(6.0).reshape(2, 3)
    model = {"a": w, "b": w.T, "c": jnp.array(w), "d": w.T}
    transpose = jnp.transpose
    ties = {"b": ("a", transpose), "c": ("b", transpose), "d": ("a", transpose)}
    first, second = (oj.setup(oj.SGD(0.1), model, ties=ties) for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert pickle.loads(pickle.dumps(first.ties)) == first.ties
    assert "transpose of transpose(a)" in oj.summary(first)
    _, new = oj.update(first, model, jax.tree.map(jnp.ones_like, model))
    assert new["b"] is new["d"]
    np.testing.assert_array_equal(new["c"], new["a"])


def test_a_branch_without_gradients_is_not_a_leaf_with_a_slash_in_its_name():
    model = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    state = oj.setup(oj.SGD(0.1), model)
    _, new = oj.update(state, model, {"a/b": jnp.ones(2), "a": None})
    np.testing.assert_allclose(new["a/b"], 0.9)
    np.testing.assert_array_equal(new["a"]["b"], 1.0)
    with pytest.raises(ValueError, match=re.escape("['a/b']")):
        oj.update(state, model, {"a": {"b": jnp.ones(2)}})


def test_a_transform_that_cannot_be_a_constant_is_refused():
    class Flip:
        __hash__ = None  # as of a class with an __eq__ of its own

        def __call__(self, x):
            return x.T

    model = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2))}
    with pytest.raises(TypeError, match="'b': its transform, a Flip, has no hash"):
        oj.setup(oj.SGD(0.1), model, ties={"b": ("a", Flip())})


def test_a_batch_that_is_the_model_cannot_be_donated():
    model = {"w": jnp.ones(3)}
    state = oj.setup(oj.SGD(0.1), model)
    step = oj.make_step(lambda model, x: jnp.sum(model["w"] * x), donate=True)
    state, model, _ = step(state, model, jnp.ones(3))
    with pytest.raises(ValueError, match="an array of the batch is one of the model"):
        step(state, model, model["w"])


def test_an_array_that_became_integers_is_not_the_model_of_setup():
    model = {"w": jnp.ones(3)}
    state = oj.setup(oj.SGD(0.1), model)
    with pytest.raises(ValueError, match="'w': dtype int32, expected float32"):
        oj.update(state, {"w": jnp.arange(3)}, {"w": jnp.ones(3)})


def test_a_frozen_tie_of_another_value_stays_in_update_and_step():
    with pytest.warns(UserWarning, match="other values"):
        model = {"a": jnp.ones(2), "b": jnp.zeros(2), "c": jnp.ones(2)}
        state = oj.setup(oj.SGD(0.1), model, ties={"b": "a"})
    state = oj.freeze(state, "a")
    grads = jax.tree.map(jnp.ones_like, model)
    _, updated = oj.update(state, model, grads)
    step = oj.make_step(lambda model: sum(jnp.sum(x) for x in model.values()))
    _, stepped, _ = step(state, model)
    for new in (updated, stepped):
        np.testing.assert_array_equal(new["b"], 0.0)
        np.testing.assert_allclose(new["c"], 0.9)


def test_a_nan_among_the_constants_compiles_once():
    traces = []

    def loss(model):
        traces.append(1)
        return jnp.sum(model["w"])

    state = oj.setup(oj.SGD(0.1), {"w": jnp.ones(2)})
    step = oj.make_step(loss)
    for _ in range(3):
        step(state, {"w": jnp.ones(2), "nan": np.float32("nan")})
    assert len(traces) == 1
