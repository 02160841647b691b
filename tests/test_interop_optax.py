"""optax both ways: a rule where optax wants its own, optax's where a rule is wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from helpers import close, same_bits

import optimjax as oj
from optimjax.interop.optax import (
    from_optax,
    state_from_optax,
    state_to_optax,
    to_optax,
)


@pytest.fixture(autouse=True)
def usual_promotion():
    """optax and Flax rely on JAX's own dtype promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


PAIRS = [
    (oj.Adam(1e-2), optax.adam(1e-2)),
    (oj.AdamW(1e-2, weight_decay=1e-3), optax.adamw(1e-2, weight_decay=1e-3)),
    (oj.SGD(0.05, momentum=0.9), optax.sgd(0.05, momentum=0.9)),
    (oj.Lion(1e-2, weight_decay=1e-3), optax.lion(1e-2, weight_decay=1e-3)),
    (oj.RMSProp(1e-2), optax.rmsprop(1e-2)),
]
NAMES = ["Adam", "AdamW", "SGD", "Lion", "RMSProp"]


def params_of(rng):
    return {
        "w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=4), jnp.float32),
    }


def by_optimjax(state, model, gradients):
    update = jax.jit(oj.update)
    for grads in gradients:
        state, model = update(state, model, grads)
    return state, model


def by_optax(tx, opt_state, params, gradients):
    @jax.jit
    def update(opt_state, params, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return opt_state, optax.apply_updates(params, updates)

    for grads in gradients:
        opt_state, params = update(opt_state, params, grads)
    return opt_state, params


@pytest.mark.parametrize(("rule", "tx"), PAIRS, ids=NAMES)
def test_a_run_goes_on_in_the_other_library(rule, tx, rng):
    params = params_of(rng)
    gradients = [params_of(rng) for _ in range(20)]
    _, ours = by_optimjax(oj.setup(rule, params), params, gradients)
    _, theirs = by_optax(tx, tx.init(params), params, gradients)
    close(ours, theirs, rtol=2e-5, atol=1e-6)

    state, model = by_optimjax(oj.setup(rule, params), params, gradients[:10])
    opt_state = state_to_optax(state, model, tx.init(model))
    _, crossed = by_optax(tx, opt_state, model, gradients[10:])
    close(crossed, ours, rtol=2e-5, atol=1e-6)

    opt_state, model = by_optax(tx, tx.init(params), params, gradients[:10])
    state = state_from_optax(oj.setup(rule, model), opt_state)
    _, crossed = by_optimjax(state, model, gradients[10:])
    close(crossed, ours, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("rule", "tx"), PAIRS, ids=NAMES)
def test_optax_as_a_rule_is_the_rule(rule, tx, rng):
    params = params_of(rng)
    gradients = [params_of(rng) for _ in range(6)]
    _, ours = by_optimjax(oj.setup(rule, params), params, gradients)
    _, theirs = by_optimjax(oj.setup(from_optax(tx), params), params, gradients)
    close(theirs, ours, rtol=2e-5, atol=1e-6)
    _, back = by_optax(to_optax(rule), to_optax(rule).init(params), params, gradients)
    close(back, ours, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
        optax.adafactor(1e-2, min_dim_size_to_factor=2),
        optax.inject_hyperparams(optax.adam)(1e-2),
        optax.contrib.prodigy(),
        optax.contrib.muon(1e-2),
        optax.lbfgs(),
        optax.multi_transform(
            {"fast": optax.adam(0.1), "slow": optax.sgd(0.1)},
            lambda slots: {path: "fast" if path == "e" else "slow" for path in slots},
        ),
    ],
)
def test_optax_gets_ties_missing_gradients_freezing_and_the_step(tx):
    w = jnp.eye(3) + 0.1
    model = {"e": w, "h": w, "b": jnp.ones(3, jnp.bfloat16), "act": jnp.tanh}

    def loss(model):
        y = model["act"](model["e"]) @ model["h"]
        return jnp.sum((y - 2) ** 2) + jnp.sum(model["b"].astype(jnp.float32) ** 2)

    state = oj.setup(from_optax(tx), model)
    step = oj.make_step(loss, donate=True)
    state, model, first = step(state, model)
    state, model, _ = step.scan(state, model, length=3)
    assert model["e"] is model["h"]
    state = oj.freeze(state, "b")
    before = jax.tree.map(jnp.copy, (state.inner, model["b"]))
    state, model, _ = step(state, model)
    same_bits(model["b"], before[1])
    kept, was = (
        [
            x
            for keys, x in jax.tree_util.tree_leaves_with_path(tree)
            if "'b'" in str(keys)
        ]
        for tree in (state.inner, before[0])
    )
    same_bits(kept, was)
    grads = {"e": jnp.ones((3, 3)), "h": None, "b": None, "act": None}
    context = {"value": jnp.ones(()), "value_fn": loss}
    state, model = jax.tree.map(lambda x: x, oj.update(state, model, grads, **context))
    assert model["e"] is model["h"] and float(first) > 0


def test_tied_leaves_get_one_slot_and_equal_updates():
    w = jnp.array([[1.0, -1.0], [0.5, 2.0]])
    params = {"encoder": w, "decoder": w}
    tx = to_optax(oj.Adam(0.1))
    opt_state = tx.init(params)
    assert list(opt_state.slots) == ["decoder"]
    grads = {"encoder": jnp.ones((2, 2)), "decoder": -3 * jnp.ones((2, 2))}
    updates, opt_state = tx.update(grads, opt_state, params)
    same_bits(updates["encoder"], updates["decoder"])
    np.testing.assert_allclose(updates["encoder"], 0.1, rtol=1e-6)  # of the sum, -2
    declared = to_optax(oj.Adam(0.1), ties={"b": ("a", jnp.transpose)})
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2)), "n": jnp.arange(3)}
    opt_state = declared.init(params)
    grads = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2)), "n": None}
    updates, _ = declared.update(grads, opt_state, params)
    same_bits(updates["a"].T, updates["b"])
    same_bits(optax.apply_updates(params, updates)["n"], params["n"])


def test_updates_need_params():
    tx = to_optax(oj.Adam())
    with pytest.raises(ValueError, match="called without params"):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))


def test_in_optax_chains_groups_and_wrappers(rng):
    params, grads = params_of(rng), params_of(rng)
    adam, sgd = oj.Adam(0.1), oj.SGD(0.1)
    groups = {"a": to_optax(adam), "b": to_optax(sgd), "empty": to_optax(sgd)}
    tx = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.multi_transform(groups, {"w": "a", "b": "b"}),
    )
    rule = oj.Chain(
        oj.ClipByGlobalNorm(0.5),
        oj.Partition({"a": adam, "b": sgd}, {"w": "a", "b": "b"}),
    )
    _, ours = by_optimjax(oj.setup(rule, params), params, [grads] * 3)
    _, theirs = by_optax(tx, tx.init(params), params, [grads] * 3)
    close(ours, theirs, rtol=2e-5)
    for wrapped in (
        optax.MultiSteps(to_optax(adam), 2),
        optax.apply_if_finite(to_optax(adam), 3),
    ):
        _, after = by_optax(wrapped, wrapped.init(params), params, [grads] * 4)
        assert not np.allclose(after["w"], params["w"])


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jax.nn.relu(linen.Dense(8)(x)))


def test_in_flax_train_state():
    x = jnp.linspace(-1, 1, 12).reshape(4, 3)
    net = Net()
    params = net.init(jax.random.key(0), x)["params"]
    state = TrainState.create(
        apply_fn=net.apply, params=params, tx=to_optax(oj.Adam(1e-2))
    )

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    values = []
    for _ in range(60):
        state, value = step(state)
        values.append(float(value))
    assert values[-1] < 0.1 * values[0]
    assert int(state.opt_state.count) == 60


def test_in_nnx_optimizer():
    x = jnp.linspace(-1, 1, 12).reshape(4, 3)
    model = nnx.Sequential(
        nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 1, rngs=nnx.Rngs(1))
    )
    optimizer = nnx.Optimizer(model, to_optax(oj.Adam(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(60)]
    assert values[-1] < 0.1 * values[0]


def test_states_that_do_not_fit_are_refused(rng):
    params = params_of(rng)
    state = oj.setup(oj.Adam(), params)
    with pytest.raises(ValueError, match=r"no ScaleByAdamState\.mu or"):
        state_to_optax(state, params, optax.sgd(0.1).init(params))
    with pytest.raises(ValueError, match="'b': nothing is known of it"):
        state_from_optax(state, optax.adam(0.1).init({"w": params["w"]}))
    with pytest.raises(TypeError, match="expected one of Adam, SGD, Lion, RMSProp"):
        state_to_optax(
            oj.setup(oj.AdaGrad(), params), params, optax.adagrad(0.1).init(params)
        )
    with pytest.raises(TypeError, match="expected an optax transformation"):
        from_optax(oj.Adam())


def test_a_state_goes_into_rules_within_wrappers_that_count(rng):
    params = params_of(rng)
    tx = optax.adam(1e-2)
    opt_state, params = by_optax(tx, tx.init(params), params, [params_of(rng)] * 3)
    for wrap in (oj.Accumulate, oj.SkipNonFinite, oj.MixedPrecision):
        state = state_from_optax(oj.setup(wrap(oj.Adam(1e-2)), params), opt_state)
        moments = jax.tree.leaves(state.inner, is_leaf=lambda node: hasattr(node, "m"))
        found = [node for node in moments if hasattr(node, "m")]
        assert len(found) == 2
        names = list(state.ties.names)
        for name, node in zip(names, found, strict=True):
            same_bits(node.m, opt_state[0].mu[name])


def now_and_then(grads, count, **context):
    return count % 3 == 0


@pytest.mark.parametrize("inner", [oj.Adam(1e-2), oj.SGD(lambda count: 0.1)])
def test_counts_for_optax_are_steps_of_the_rule_and_not_calls(inner, rng):
    params = params_of(rng)
    state = oj.setup(oj.ApplyIf(inner, now_and_then), params)
    for _ in range(5):
        state, params = oj.update(state, params, params_of(rng))
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: 0.1))
    if isinstance(inner, oj.SGD):
        tx = optax.sgd(lambda count: 0.1)
    counts = optax.tree.get_all_with_path(
        state_to_optax(state, params, tx.init(params)), "count"
    )
    assert [int(count) for _, count in counts] == [2] * len(counts) and counts


@pytest.mark.parametrize(
    ("rule", "tx"),
    [
        (oj.Adam(0.1), optax.adam(0.1)),
        (oj.SGD(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    ],
    ids=["Adam", "SGD"],
)
def test_slots_that_count_alone_take_their_count_from_optax(rule, tx):
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    theirs = tx.init(params)
    for _ in range(5):
        _, theirs = tx.update(params, theirs, params)
    state = oj.thaw(oj.freeze(oj.setup(rule, params), "b"))  # b counts alone
    _, new = oj.update(state_from_optax(state, theirs), params, params)
    updates, _ = tx.update(params, theirs, params)
    for path, x in optax.apply_updates(params, updates).items():
        np.testing.assert_allclose(new[path], x, rtol=1e-6)
