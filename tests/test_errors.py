"""Mistakes are found before anything is computed; the message names path and remedy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Net

import optimjax as oj


def model_of_layers():
    return {
        "layers": [{"w": jnp.ones((3, 1)), "b": jnp.ones(1)}, {"w": jnp.ones((2, 2))}],
        "rate": 0.5,
        "act": jnp.tanh,
    }


def gradients(**changes):
    grads = {
        "layers": [{"w": jnp.ones((3, 1)), "b": jnp.ones(1)}, {"w": jnp.ones((2, 2))}],
        "rate": None,
        "act": None,
    }
    return grads | changes


def state_of(model):
    return oj.setup(oj.Adam(0.1), model)


def layer(**changes):
    return gradients(layers=[gradients()["layers"][0] | changes, None])


# What is wrong with the gradients, the error, and what its text must contain.
GRADS = {
    "transposed": (
        layer(w=jnp.ones((1, 3))),
        ValueError,
        r"layers/0/w.*\(1, 3\).*\(3, 1\)",
    ),
    "would broadcast": (
        layer(w=jnp.ones(1)),
        ValueError,
        r"layers/0/w.*\(1,\).*\(3, 1\)",
    ),
    "scalar": (layer(b=jnp.ones(())), ValueError, r"layers/0/b.*\(\).*\(1,\)"),
    "integers": (layer(b=jnp.ones(1, int)), ValueError, "layers/0/b.*int32.*float"),
    "complex": (
        layer(b=jnp.ones(1, complex)),
        ValueError,
        "layers/0/b.*complex64.*real",
    ),
    "missing key": (
        {k: v for k, v in gradients().items() if k != "layers"},
        ValueError,
        "layers",
    ),
    "missing in branch": (
        gradients(layers=[{"w": jnp.ones((3, 1))}, None]),
        ValueError,
        "layers/0/b.*None",
    ),
    "unknown key": (gradients(more=jnp.ones(2)), ValueError, "more"),
    "another container": (
        gradients(layers={"0": {"w": jnp.ones((3, 1))}}),
        ValueError,
        "layers/0",
    ),
    "tree for a leaf": (
        layer(w={"deep": jnp.ones((3, 1))}),
        ValueError,
        "layers/0/w",
    ),
    "leaf for a tree": (gradients(layers=jnp.ones(2)), ValueError, "layers"),
    "python float": (gradients(rate=jnp.float32(1)), TypeError, r"rate.*jnp\.asarray"),
    "python gradient": (gradients(rate=1.0), TypeError, r"rate.*jnp\.asarray"),
    "for a function": (gradients(act=jnp.float32(1)), (TypeError, ValueError), "act"),
    "a list": (layer(w=[[1.0], [2.0], [3.0]]), ValueError, "layers/0/w"),
}


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", GRADS)
def test_gradients_that_do_not_fit(name, trace):
    """A gradient that broadcasts would change the parameter's shape in silence."""
    grads, error, text = GRADS[name]
    model = model_of_layers()
    state = state_of(model)
    with pytest.raises(error, match=f"(?s)update: .*{text}"):
        if trace:
            jax.eval_shape(lambda s: oj.update(s, model, grads)[0], state)
        else:
            oj.update(state, model, grads)


def test_all_offenders_are_named_at_once_up_to_five():
    """Ten wrong shapes must not be found in ten runs, nor fill the screen."""
    model = {f"w{i}": jnp.ones(2) for i in range(8)}
    grads = {f"w{i}": jnp.ones(3) for i in range(8)}
    with pytest.raises(ValueError, match="w0") as caught:
        oj.update(state_of(model), model, grads)
    text = str(caught.value)
    assert sum(f"'w{i}'" in text for i in range(8)) == 5
    assert "3 more" in text
    assert len(text) < 1500


def test_mistakes_are_found_before_anything_is_computed():
    """A state that is half updated when the error comes is worse than none."""
    calls = []

    @oj.rule
    class Noisy(oj.LeafRule):
        """Tells when it is asked for a step."""

        learning_rate: oj.Hyper = 0.1

        def init_leaf(self, x):
            return None

        def apply_leaf(self, state, x, g, t):
            calls.append(x)
            return state, g

    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = oj.setup(Noisy(), model)
    with pytest.raises(ValueError, match="'b'"):
        oj.update(state, model, {"a": jnp.ones(2), "b": jnp.ones(3)})
    assert not calls


@pytest.mark.parametrize(
    "model", [{}, {"n": 3, "f": jnp.tanh}, {"i": jnp.arange(3)}, 1.0, None]
)
def test_nothing_to_train(model):
    """An optimiser of nothing runs for hours before anyone sees it."""
    with pytest.raises(ValueError, match=r"setup: .*[Tt]rain.*float"):
        oj.setup(oj.SGD(0.1), model)


def test_selection_that_trains_nothing():
    """A typing error in `trainable=` must not train nothing in silence."""
    with pytest.raises(ValueError, match=r"setup: .*heads.*layers/0/b"):
        oj.setup(oj.SGD(0.1), model_of_layers(), trainable="heads/*")
    with pytest.raises(ValueError, match=r"setup: .*train"):
        oj.setup(oj.SGD(0.1), model_of_layers(), trainable=lambda path, leaf: False)


def test_unregistered_class_that_holds_arrays():
    """Its arrays would be carried along and never trained."""

    class Dense:
        def __init__(self):
            self.kernel = jnp.ones((2, 2))

    class Outer:
        def __init__(self):
            self.parts = [Dense()]

    for bad in (Dense(), Outer()):
        with pytest.raises(TypeError, match=r"(?s)setup: 'net/1'.*register"):
            oj.setup(oj.SGD(0.1), {"net": [jnp.ones(2), bad]})


def test_object_without_arrays_is_carried():
    """A tokenizer or a config in the model is no mistake."""

    class Config:
        def __init__(self):
            self.size, self.names = 3, ["a"]

    config = Config()
    model = {"w": jnp.ones(2), "config": config}
    _, new = oj.update(state_of(model), model, {"w": jnp.ones(2), "config": None})
    assert new["config"] is config


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: oj.SGD(-0.1), "SGD: learning_rate is -0.1.*>= 0"),
        (lambda: oj.Adam(np.float32(-2)), r"Adam: learning_rate is -2.*>= 0"),
        (lambda: oj.Adam(jnp.asarray(-2.0)), r"Adam: learning_rate is -2.*>= 0"),
        (lambda: oj.Adam({"a": 0.1, "*": -3}), "Adam: learning_rate.*-3.*>= 0"),
        (lambda: oj.Adam(float("nan")), "Adam: learning_rate is nan"),
        (lambda: oj.Adam(b1=1.0), r"Adam: b1 is 1.*\[0, 1\)"),
        (lambda: oj.Adam(b2=1.5), r"Adam: b2 is 1.5.*\[0, 1\)"),
        (lambda: oj.Adam(eps=-1e-8), "Adam: eps is -1e-08.*>= 0"),
        (lambda: oj.SGD(0.1, momentum=-0.9), r"SGD: momentum is -0.9.*\[0, 1\)"),
        (lambda: oj.SGD(0.1, weight_decay=-1), "SGD: weight_decay is -1.*>= 0"),
        (lambda: oj.SGD(0.1, nesterov=True), "SGD: nesterov.*momentum"),
        (lambda: oj.ClipByGlobalNorm(-1.0), "ClipByGlobalNorm: max_norm is -1.*>= 0"),
        (lambda: oj.WeightDecay(-0.1), "WeightDecay: weight_decay is -0.1.*>= 0"),
    ],
)
def test_numbers_out_of_range(build, text):
    """Steps are subtracted: a negative rate climbs."""
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.parametrize(
    "value", ["0.1", None, [0.1, 0.2], 1j, object()], ids=lambda v: type(v).__name__
)
def test_values_that_are_no_hyperparameter(value):
    """A string from a config file must not reach the first step."""
    with pytest.raises((TypeError, ValueError), match="Adam: learning_rate"):
        oj.Adam(value)


def test_rules_that_are_none():
    """A class for an instance, or another library's optimiser, is said so."""
    for bad in (oj.Adam, "adam", None, lambda x: x, 0.1):
        with pytest.raises(TypeError, match=r"setup: .*rule"):
            oj.setup(bad, {"w": jnp.ones(2)})
        with pytest.raises(TypeError, match=r"Chain: .*rule"):
            oj.Chain(oj.SGD(0.1), bad)
    with pytest.raises(TypeError, match=r"setup: .*rule"):
        oj.setup({"w": jnp.ones(2)}, oj.Adam())


@pytest.mark.parametrize("call", [oj.update, jax.jit(oj.update)])
def test_state_is_not_the_first_argument(call):
    """State comes first; the usual exchange must not end in a strange traceback."""
    model = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match=r"update: .*state"):
        call(model, state_of(model), model)


@pytest.mark.parametrize("scan", [False, True], ids=["update", "scan"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m | {"new": jnp.ones(2)}, "new"),
        (lambda m: m | {"layers": m["layers"][:1]}, "layers/1/w"),
        (lambda m: m | {"layers": [m["layers"][1], m["layers"][0]]}, "layers/0"),
        (
            lambda m: (
                m
                | {
                    "layers": [
                        {"w": jnp.ones((3, 2)), "b": m["layers"][0]["b"]},
                        m["layers"][1],
                    ]
                }
            ),
            r"layers/0/w.*\(3, 2\).*\(3, 1\)",
        ),
    ],
    ids=["more", "fewer", "other paths", "other shape"],
)
def test_model_that_is_not_the_one_of_setup(change, text, scan):
    """A state must not be applied to another model, path by path as it happens."""
    model = model_of_layers()
    state = state_of(model)
    other = change(model)
    if scan:
        step = oj.make_step(lambda m: jnp.sum(m["layers"][0]["w"]).astype(jnp.float32))
        plain = oj.setup(oj.SGD(0.1), model)
        for state in (state_of(model), plain, step(plain, model)[0]):
            with pytest.raises(ValueError, match=f"(?s){text}"):
                step(state, other)
            with pytest.raises(ValueError, match=f"(?s){text}"):
                step.scan(state, other, length=2)
    else:
        with pytest.raises(ValueError, match=f"(?s)update: .*{text}"):
            oj.update(state, other, other | {"rate": None, "act": None})


def test_loss_that_cannot_be_differentiated():
    """A loss that is no scalar is said to be one, before the rule sees it."""
    model = {"w": jnp.ones(2)}
    state = state_of(model)
    for bad in (lambda m: m["w"], lambda m: (jnp.sum(m["w"]), 1), lambda m: None):
        with pytest.raises(TypeError, match=r"loss|scalar"):
            oj.make_step(bad)(state, model)
    with pytest.raises(TypeError, match=r"loss|has_aux|pair|tuple"):
        oj.make_step(lambda m: jnp.sum(m["w"]), has_aux=True)(state, model)
    with pytest.raises((TypeError, ValueError), match=r"length|batch"):
        oj.make_step(lambda m: jnp.sum(m["w"])).scan(state, model)


def test_equinox_paths_in_errors():
    """Paths in messages are those that `state.slots` and `where=` take."""
    net = Net(jax.random.key(0))
    grads = jax.tree.map(
        lambda x: jnp.ones(2) if eqx.is_inexact_array(x) else None, net
    )
    with pytest.raises(ValueError, match=r"update: 'first/weight'.*\(2,\).*\(3, 3\)"):
        oj.update(state_of(net), net, grads)
