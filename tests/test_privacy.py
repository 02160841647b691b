"""Per-example gradients, clipped and with noise."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counter, close, same_bits

import optimjax as oj


def loss(m, x, y):
    """Of one example: x (3,), y ()."""
    hidden = jnp.tanh(x @ m["w"] + m["b"])
    return (jnp.sum(hidden) - y) ** 2


def model():
    w = jnp.array([[0.4, -0.2], [0.1, 0.7], [-0.5, 0.3]])
    return {"w": w, "b": jnp.array([0.2, -0.4])}


def batch(n=5, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 3)), 3 * rng.normal(size=n)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def rule(max_norm=1.3, noise_multiplier=0.0, seed=0, then=None):
    private = oj.PrivateGradients(max_norm, noise_multiplier, seed)
    return oj.Chain(private, then or oj.SGD(0.1))


def each_gradient(m, x, y):
    return jax.vmap(jax.grad(loss), (None, 0, 0))(m, x, y)


def test_one_step_in_numpy():
    m, (x, y) = model(), batch()
    total = {k: np.zeros(v.shape) for k, v in m.items()}
    each = [jax.grad(loss)(m, a, b) for a, b in zip(x, y, strict=True)]
    each = [{k: np.asarray(v, float) for k, v in g.items()} for g in each]
    lengths = [np.sqrt(sum((v**2).sum() for v in g.values())) for g in each]
    max_norm = float(np.median(lengths)) * 1.01
    assert min(lengths) < max_norm < max(lengths)
    for g, length in zip(each, lengths, strict=True):
        for k in total:
            total[k] += g[k] * min(1, max_norm / length)
    step = oj.make_step(loss, per_example=True)
    _, after, value = step(oj.setup(rule(max_norm), m), m, x, y)
    for k in m:
        np.testing.assert_allclose(after[k], m[k] - 0.1 * total[k] / 5, rtol=1e-5)
    one_by_one = [loss(m, a, b) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(value, np.mean(one_by_one), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_as_dpsgd_of_optax_without_noise():
    m = other = model()
    state, step = oj.setup(rule(), m), oj.make_step(loss, per_example=True)
    peer = optax.contrib.dpsgd(0.1, l2_norm_clip=1.3, noise_multiplier=0.0, seed=0)
    theirs = peer.init(other)
    for seed in range(6):
        x, y = batch(seed=seed)
        state, m, _ = step(state, m, x, y)
        updates, theirs = peer.update(each_gradient(other, x, y), theirs)
        other = optax.apply_updates(other, updates)
    close(m, other)


def test_without_clipping_it_is_the_gradient_of_the_mean():
    def mean(m, x, y):
        return jnp.mean(jax.vmap(loss, (None, 0, 0))(m, x, y))

    m, (x, y) = model(), batch()
    private = oj.make_step(loss, per_example=True)
    state = oj.setup(rule(max_norm=1e6, then=oj.Adam(0.1)), m)
    _, after, value = private(state, m, x, y)
    _, plain, same = oj.make_step(mean)(oj.setup(oj.Adam(0.1), m), m, x, y)
    close(after, plain)
    close(value, same)


def noise_of(max_norm, noise_multiplier, examples, seed=0, steps=1):
    """What comes out where all gradients are 0: (steps, 40_000)."""
    private = oj.PrivateGradients(max_norm, noise_multiplier, seed)
    m = {"w": jnp.zeros((200, 200))}
    state, out = private.init(m), []
    for _ in range(steps):
        zeros = {"w": jnp.zeros((examples, 200, 200))}
        state, step = private.apply(state, m, zeros)
        out.append(np.asarray(step["w"]).ravel())
    return np.stack(out)


@pytest.mark.parametrize(
    ("max_norm", "multiplier", "examples"),
    [(1.5, 0.7, 1), (1.5, 0.7, 4), (3.0, 1.1, 2)],
)
def test_noise_has_the_variance_that_it_should(max_norm, multiplier, examples):
    n = noise_of(max_norm, multiplier, examples)[0]
    sigma = max_norm * multiplier / examples
    assert abs(n.mean()) < 4 * sigma / np.sqrt(n.size)
    np.testing.assert_allclose(n.std(), sigma, rtol=4 / np.sqrt(2 * n.size))
    np.testing.assert_allclose(np.mean(n**4), 3 * sigma**4, rtol=0.1)


def test_noise_is_new_at_each_step_and_a_seed_repeats_it():
    first = noise_of(1.0, 1.0, 1, seed=1, steps=2)
    assert abs(np.corrcoef(first)[0, 1]) < 0.02
    assert np.array_equal(first, noise_of(1.0, 1.0, 1, seed=1, steps=2))
    other = noise_of(1.0, 1.0, 1, seed=2)[0]
    assert abs(np.corrcoef(first[0], other)[0, 1]) < 0.02


def test_noise_of_two_slots_differs():
    private = oj.PrivateGradients(1.0, 1.0)
    m = {"a": jnp.zeros(1000), "b": jnp.zeros(1000)}
    zeros = jax.tree.map(lambda x: x[None], m)
    _, steps = private.apply(private.init(m), m, zeros)
    assert abs(np.corrcoef(steps["a"], steps["b"])[0, 1]) < 0.15


def test_no_example_has_more_influence_than_max_norm():
    """Exchange one example for an enormous one: the sum moves by 2 max_norm at most."""
    m, (x, y) = model(), batch()
    private = oj.PrivateGradients(0.9, 0.0)
    sums = []
    for factor in (1.0, -1e4):
        g = each_gradient(m, x, y.at[2].multiply(factor))
        _, steps = private.apply(private.init(m), m, g)
        sums.append(jax.tree.map(lambda s: 5 * s, steps))
    apart = jax.tree.map(jnp.subtract, *sums)
    length = np.sqrt(sum(float(jnp.sum(s**2)) for s in apart.values()))
    assert 0.1 < length <= 2 * 0.9 * (1 + 1e-5)


def tied_loss(m, x):
    return jnp.sum(jnp.tanh(x @ m["in"]) @ m["out"][0]) ** 2


@pytest.mark.parametrize("by_update", [False, True])
def test_a_tied_array_counts_once_with_its_summed_gradient(by_update):
    w = jnp.array([[0.4, -0.2], [0.1, 0.7]])
    tied = {"in": w, "out": (w,)}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2)), jnp.float32)
    state = oj.setup(rule(max_norm=0.3), tied)
    if by_update:
        grads = jax.vmap(jax.grad(tied_loss), (None, 0))(tied, x)
        _, after = oj.update(state, tied, grads)
    else:
        _, after, _ = oj.make_step(tied_loss, per_example=True)(state, tied, x)
    assert after["in"] is after["out"][0]
    single = {"in": jnp.array(w, copy=True)}
    step = oj.make_step(
        lambda m, x: tied_loss({**m, "out": (m["in"],)}, x), per_example=True
    )
    _, alone, _ = step(oj.setup(rule(max_norm=0.3), single), single, x)
    close(after["in"], alone["in"])


def test_a_frozen_slot_counts_for_nothing():
    m, (x, y) = model(), batch()
    state = oj.freeze(oj.setup(rule(), m), "b")
    step = oj.make_step(loss, per_example=True)
    _, after, _ = step(state, m, x, y)
    same_bits(after["b"], m["b"])
    only = oj.make_step(
        lambda w, x, y: loss({**w, "b": m["b"]}, x, y), per_example=True
    )
    w = {"w": m["w"]}
    _, alone, _ = only(oj.setup(rule(), w), w, x, y)
    close(after["w"], alone["w"])


def test_update_takes_gradients_of_a_vmap():
    m, (x, y) = model(), batch()
    noisy = rule(noise_multiplier=0.5)
    _, by_step, _ = oj.make_step(loss, per_example=True)(oj.setup(noisy, m), m, x, y)
    grads = each_gradient(m, x, y)
    for update in (oj.update, jax.jit(oj.update)):
        _, by_update = update(oj.setup(noisy, m), m, grads)
        close(by_update, by_step)
    nothing = {"w": None, "b": None}
    state = oj.setup(noisy, m)
    same_bits(oj.update(state, m, nothing)[1], m)
    _, part = oj.update(state, m, {**grads, "b": None})
    same_bits(part["b"], m["b"])
    assert not np.array_equal(part["w"], m["w"])


def test_scan_and_donation():
    m = model()
    batches = [batch(seed=i) for i in range(4)]
    noisy = rule(noise_multiplier=0.5)
    step = oj.make_step(loss, per_example=True, donate=True)
    state, one = oj.setup(noisy, m), model()
    values = []
    for x, y in batches:
        state, one, value = step(state, one, x, y)
        values.append(value)
    stacked = [jnp.stack(each) for each in zip(*batches, strict=True)]
    m = model()
    _, many, scanned = step.scan(oj.setup(noisy, m), m, *stacked)
    close(one, many)
    close(jnp.stack(values), scanned)


def test_aux_is_of_each_example():
    def with_aux(m, x, y):
        return loss(m, x, y), {"y": 2 * y}

    m, (x, y) = model(), batch()
    step = oj.make_step(with_aux, per_example=True, has_aux=True)
    _, _, (value, aux) = step(oj.setup(rule(), m), m, x, y)
    assert value.shape == ()
    close(aux["y"], 2 * y)


def test_sixteen_bits_and_sixty_four(x64):
    for dtype in (jnp.bfloat16, jnp.float64):
        m = jax.tree.map(lambda x, d=dtype: x.astype(d), model())
        x, y = (each.astype(dtype) for each in batch())
        state = oj.setup(rule(noise_multiplier=0.1), m)
        step = oj.make_step(loss, per_example=True)
        after, new, _ = step(state, m, x, y)
        assert {v.dtype for v in new.values()} == {jnp.dtype(dtype)}
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_slots_of_two_dtypes(x64):
    m = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(3, jnp.float64)}
    private = oj.PrivateGradients(1.0, 0.0)
    g = {"a": jnp.ones((2, 2), jnp.float32), "b": jnp.ones((2, 3), jnp.float64)}
    _, steps = private.apply(private.init(m), m, g)
    close(steps, jax.tree.map(lambda x: x / np.sqrt(5).astype(x.dtype), m))


def test_a_scalar_parameter_and_gradients_of_zero():
    m = {"s": jnp.asarray(0.5)}
    private = oj.PrivateGradients(1.0, 0.0)
    _, steps = private.apply(private.init(m), m, {"s": jnp.array([0.0, 0.5, -4.0])})
    close(steps["s"], jnp.asarray((0.5 - 1.0) / 3, jnp.float32))


def test_one_compilation_for_all_values():
    counted = Counter(loss)
    m, (x, y) = model(), batch()
    state, step = (
        oj.setup(rule(noise_multiplier=0.5), m),
        oj.make_step(counted, per_example=True),
    )
    state, m, _ = step(state, m, x, y)
    traces = counted.traces
    state = oj.adjust(state, max_norm=0.7, noise_multiplier=1.3)
    step(state, m, x, y)
    assert counted.traces == traces


def test_rules_after_it_see_one_gradient():
    """Averages, masters and schedules work behind it as behind any rule."""
    m, (x, y) = model(), batch()
    for then in (
        oj.EMA(oj.Adam(0.1)),
        oj.MixedPrecision(oj.SGD(0.1)),
        oj.Chain(oj.ClipByGlobalNorm(0.1), oj.SGD(0.1, momentum=0.9)),
        oj.Accumulate(oj.SGD(0.1), every=2),
    ):
        step = oj.make_step(loss, per_example=True)
        _, new, _ = step(oj.setup(rule(then=then), m), m, x, y)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, m)


# Mistakes ---------------------------------------------------------------------------


def test_per_example_is_for_private_gradients():
    m, (x, y) = model(), batch()
    step = oj.make_step(loss, per_example=True)
    state = oj.setup(oj.SGD(0.1), m)
    with pytest.raises(ValueError, match="or a Chain that begins with it"):
        step(state, m, x, y)
    with pytest.raises(ValueError, match="or a Chain that begins with it"):
        step.scan(state, m, x[None], y[None])
    private = oj.PrivateGradients(1.0, 1.0)
    for late in (
        oj.Chain(oj.ClipByGlobalNorm(1.0), private, oj.SGD(0.1)),
        oj.Chain(private, private, oj.SGD(0.1)),
        oj.Accumulate(private),
        oj.Partition({"all": oj.Chain(private, oj.SGD(0.1))}, {"*": "all"}),
    ):
        with pytest.raises(ValueError, match=r"Let it come first: Chain\(Private"):
            oj.setup(late, m)


def test_private_gradients_want_per_example():
    m = model()
    state = oj.setup(rule(), m)
    wanted = re.escape("make_step(loss, per_example=True)")
    with pytest.raises(ValueError, match=wanted):
        oj.make_step(lambda m: jnp.sum(m["w"]))(state, m)
    with pytest.raises(ValueError, match=wanted) as caught:
        oj.update(state, m, m)
    assert "'w': gradient has shape (3, 2), expected a first axis" in str(caught.value)
    private = oj.PrivateGradients(1.0, 1.0)
    with pytest.raises(ValueError, match=re.escape("expected (examples, 3, 2)")):
        private.apply(private.init(m), m, {"w": m["w"], "b": None})


def test_gradients_that_do_not_fit_are_refused():
    m, (x, y) = model(), batch()
    state, grads = oj.setup(rule(), m), each_gradient(m, x, y)
    with pytest.raises(ValueError, match=re.escape("(2, 3), expected (3, 2)")):
        oj.update(state, m, {**grads, "w": grads["w"].swapaxes(1, 2)})
    with pytest.raises(ValueError, match="first axis of one length"):
        oj.update(state, m, {**grads, "b": grads["b"][:3]})
    private = oj.PrivateGradients(1.0, 1.0)
    with pytest.raises(ValueError, match="'b': gradients of 3 examples"):
        private.apply(private.init(m), m, {**grads, "b": grads["b"][:3]})
    with pytest.raises(ValueError, match="no examples, expected one at least"):
        private.apply(private.init(m), m, jax.tree.map(lambda g: g[:0], grads))


@pytest.mark.parametrize("n", [0, None])
def test_a_batch_without_examples_is_refused(n):
    m, (x, y) = model(), batch()
    step = oj.make_step(loss, per_example=True)
    bad = (x[:0], y[:0]) if n == 0 else (x, y[0])
    with pytest.raises(ValueError, match="a batch of shapes"):
        step(oj.setup(rule(), m), m, *bad)
    with pytest.raises(ValueError, match=re.escape("shapes [(5, 3), (4,)]")):
        step(oj.setup(rule(), m), m, x, y[:4])
    with pytest.raises(ValueError, match=re.escape("a batch of shapes []")):
        step(oj.setup(rule(), m), m)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="sam and per_example, expected one"):
        oj.make_step(loss, per_example=True, sam=0.05)
    with pytest.raises(ValueError, match="noise_multiplier is -1, expected >= 0"):
        oj.PrivateGradients(1.0, -1.0)
    with pytest.raises(TypeError, match="max_norm differs by path"):
        oj.PrivateGradients({"w": 1.0, "*": 2.0}, 1.0)
    m = {"z": jnp.ones(2, jnp.complex64)}
    with pytest.raises(TypeError, match="'z'"):
        oj.setup(rule(), m)
