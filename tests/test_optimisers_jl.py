"""Which of our rules goes where Optimisers.jl goes, and what we do where that is wrong.

Each rule of Optimisers.jl 0.4 is written down here in NumPy, with its own letters and
defaults: a generator of the parameter after each step. It is compared over 20 steps in
float64 with our rule, built with the options that make them the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj

STEPS = 20


def descent(x, gs, η=0.1):
    for g in gs:
        x = x - η * g
        yield x


def momentum(x, gs, η=0.01, ρ=0.9):
    v = 0
    for g in gs:
        v = ρ * v + η * g
        x = x - v
        yield x


def nesterov(x, gs, η=0.001, ρ=0.9):
    v = 0
    for g in gs:
        x = x - (-(ρ**2) * v + (1 + ρ) * η * g)
        v = ρ * v - η * g
        yield x


def rmsprop(x, gs, η=0.001, ρ=0.9, ϵ=1e-8, centred=False):
    quad = lin = 0
    for g in gs:
        quad = ρ * quad + (1 - ρ) * g**2
        lin = ρ * lin + (1 - ρ) * g if centred else 0
        x = x - g * η / (np.sqrt(quad - lin**2) + ϵ)
        yield x


def rprop(x, gs, η=1e-3, factors=(0.5, 1.2), Γ=(1e-6, 50.0)):
    before, η = 0 * x, np.full_like(x, η)
    for g in gs:
        turn = before * g
        up, down = np.minimum(η * factors[1], Γ[1]), np.maximum(η * factors[0], Γ[0])
        η = np.where(turn > 0, up, np.where(turn < 0, down, η))
        before = np.where(turn < 0, 0, g)
        x = x - η * np.sign(before)
        yield x


def moments(gs, β, initial=0.0):
    m = v = initial
    for g in gs:
        m = β[0] * m + (1 - β[0]) * g
        v = β[1] * v + (1 - β[1]) * g**2
        yield g, m, v


def adam(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-8):
    for t, (_, m, v) in enumerate(moments(gs, β), 1):
        x = x - m / (1 - β[0] ** t) / (np.sqrt(v / (1 - β[1] ** t)) + ϵ) * η
        yield x


def adamw(x, gs, η=0.001, β=(0.9, 0.999), λ=0.0, ϵ=1e-8, couple=True):
    for t, (_, m, v) in enumerate(moments(gs, β), 1):
        step = m / (1 - β[0] ** t) / (np.sqrt(v / (1 - β[1] ** t)) + ϵ) * η
        x = x - step - (η if couple else 1) * λ * x
        yield x


def radam(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-8):
    ρ_inf = 2 / (1 - β[1]) - 1
    for t, (_, m, v) in enumerate(moments(gs, β), 1):
        ρ = ρ_inf - 2 * t * β[1] ** t / (1 - β[1] ** t)
        step = m * η / (1 - β[0] ** t)
        if ρ > 4:
            top = (ρ - 4) * (ρ - 2) * ρ_inf
            r = np.sqrt(top / ((ρ_inf - 4) * (ρ_inf - 2) * ρ))
            step = step * r / (np.sqrt(v / (1 - β[1] ** t)) + ϵ)
        x = x - step
        yield x


def adamax(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-8):
    u = 0
    for t, (g, m, _) in enumerate(moments(gs, β), 1):
        u = np.maximum(β[1] * u, np.abs(g))
        x = x - η / (1 - β[0] ** t) * m / (u + ϵ)
        yield x


def oadam(x, gs, η=0.001, β=(0.5, 0.9), ϵ=1e-8):
    term = 0
    for t, (_, m, v) in enumerate(moments(gs, β), 1):
        before, term = (
            term,
            η * m / (1 - β[0] ** t) / (np.sqrt(v / (1 - β[1] ** t)) + ϵ),
        )
        x = x - (2 * term - before)
        yield x


def adagrad(x, gs, η=0.1, ϵ=1e-8):
    acc = ϵ
    for g in gs:
        acc = acc + g**2
        x = x - g * η / (np.sqrt(acc) + ϵ)
        yield x


def adadelta(x, gs, ρ=0.9, ϵ=1e-8):
    acc = Δacc = 0
    for g in gs:
        acc = ρ * acc + (1 - ρ) * g**2
        step = g * np.sqrt(Δacc + ϵ) / np.sqrt(acc + ϵ)
        Δacc = ρ * Δacc + (1 - ρ) * step**2
        x = x - step
        yield x


def adabelief(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-16):
    s = 0
    for t, (g, m, _) in enumerate(moments(gs, β), 1):
        s = β[1] * s + (1 - β[1]) * (g - m) ** 2 + ϵ
        x = x - η * m / (1 - β[0] ** t) / (np.sqrt(s / (1 - β[1] ** t)) + ϵ)
        yield x


# Those with a fault: what Optimisers.jl does, and what we and the paper do instead.


def lion_of_jl(x, gs, η=0.001, β=(0.9, 0.999)):
    m = 0
    for g in gs:
        m = β[1] * g + (1 - β[1]) * m  # the weights are exchanged
        x = x - η * np.sign((β[1] - β[0]) * g + β[0] * m)
        yield x


def lion(x, gs, η=0.001, β=(0.9, 0.999)):
    m = 0
    for g in gs:
        x = x - η * np.sign(β[0] * m + (1 - β[0]) * g)
        m = β[1] * m + (1 - β[1]) * g
        yield x


def nadam(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-8, extra=1.0):
    for t, (g, m, v) in enumerate(moments(gs, β), 1):
        top = β[0] * m / (1 - β[0] ** (t + 1)) + (1 - β[0]) * g / (1 - β[0] ** t)
        x = x - top / (np.sqrt(v * extra / (1 - β[1] ** t)) + ϵ) * η
        yield x


def nadam_of_jl(x, gs):
    return nadam(x, gs, extra=0.999)  # β2 a second time, inside of the root


def amsgrad(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-8):
    top = 0
    for t, (_, m, v) in enumerate(moments(gs, β), 1):
        top = np.maximum(top, v / (1 - β[1] ** t))
        x = x - η * m / (1 - β[0] ** t) / (np.sqrt(top) + ϵ)
        yield x


def amsgrad_of_jl(x, gs, η=0.001, β=(0.9, 0.999), ϵ=1e-8):
    top = ϵ
    for _, m, v in moments(gs, β, initial=ϵ):  # and no bias is corrected
        top = np.maximum(top, v)
        x = x - η * m / (np.sqrt(top) + ϵ)
        yield x


CASES = {
    "Descent": (descent, oj.SGD(0.1)),
    "Momentum": (momentum, oj.Momentum(0.01, momentum=0.9)),
    "Momentum-outside": (momentum, oj.SGD(0.01, momentum=0.9)),  # constant η: the same
    "Nesterov": (nesterov, oj.Momentum(1e-3, momentum=0.9, nesterov=True)),
    "Nesterov-outside": (nesterov, oj.SGD(1e-3, momentum=0.9, nesterov=True)),
    "RMSProp": (rmsprop, oj.RMSProp(1e-3, eps=1e-8, eps_root=0.0)),
    "RMSProp-centred": (
        lambda x, gs: rmsprop(x, gs, centred=True),
        oj.RMSProp(1e-3, eps=1e-8, eps_root=0.0, centered=True),
    ),
    "Rprop": (rprop, oj.Rprop(1e-3)),
    "Adam": (adam, oj.Adam()),
    "AdamW": (
        lambda x, gs: adamw(x, gs, λ=0.1),
        oj.AdamW(weight_decay=0.1),
    ),
    "AdamW-uncoupled": (
        lambda x, gs: adamw(x, gs, λ=0.01, couple=False),
        oj.AdamW(weight_decay=0.01, couple=False),
    ),
    "RAdam": (radam, oj.RAdam(threshold=4.0)),
    "AdaMax": (adamax, oj.Adamax(eps_outside=True)),
    "OAdam": (oadam, oj.OptimisticAdam(b1=0.5, b2=0.9, double_first=True)),
    "AdaGrad": (
        adagrad,
        oj.AdaGrad(0.1, initial_accumulator=1e-8, eps=1e-8, eps_root=0.0),
    ),
    "AdaDelta": (adadelta, oj.AdaDelta(eps=1e-8)),
    "AdaBelief": (adabelief, oj.AdaBelief()),
}
# (Optimisers.jl, the paper, ours): ours is the paper's.
FAULTS = {
    "Lion": (lion_of_jl, lion, oj.Lion(1e-3, b2=0.999, weight_decay=0.0)),
    "NAdam": (nadam_of_jl, nadam, oj.NAdam()),
    "AMSGrad": (amsgrad_of_jl, amsgrad, oj.AMSGrad(debias_v="before")),
}


@pytest.fixture
def drawn(x64, rng):
    """A parameter, and gradients that change sign and size."""
    sizes = np.exp(rng.normal(size=(STEPS, 1, 1)))
    return rng.normal(size=(3, 4)), sizes * rng.normal(size=(STEPS, 3, 4))


def ours(rule, x, gs):
    model = {"x": jnp.asarray(x)}
    state = oj.setup(rule, model)
    for g in gs:
        state, model = oj.update(state, model, {"x": jnp.asarray(g)})
        yield np.asarray(model["x"])


def apart(theirs, rule, x, gs):
    """The largest difference of any way from the start, as a share of it."""
    a, b = (np.stack([*way]) - x for way in (theirs(x, gs), ours(rule, x, gs)))
    assert len(a) == len(b) == STEPS
    return np.max(np.abs(a - b)) / np.max(np.abs(a))


@pytest.mark.parametrize(("theirs", "rule"), list(CASES.values()), ids=CASES)
def test_same_way_as_optimisers_jl(theirs, rule, drawn):
    assert apart(theirs, rule, *drawn) < 1e-12


@pytest.mark.parametrize(("wrong", "right", "rule"), list(FAULTS.values()), ids=FAULTS)
def test_not_where_optimisers_jl_is_wrong(wrong, right, rule, drawn):
    assert apart(right, rule, *drawn) < 1e-12
    assert apart(wrong, rule, *drawn) > 1e-5


def test_lion_of_optimisers_jl_is_sign_descent(drawn):
    """Its memory is a thousandth of what came before: what is left is the sign."""
    assert apart(lion_of_jl, oj.SignSGD(1e-3), *drawn) < 1e-12


def test_momentum_in_and_out_differ_when_the_learning_rate_falls(drawn):
    """The reason for two rules: Optimisers.jl's is ours called `Momentum`."""
    x, gs = drawn
    rates = [0.05 * 0.8**t for t in range(STEPS)]

    def theirs(x, gs):
        v = 0
        for g, η in zip(gs, rates, strict=True):
            v = 0.9 * v + η * g
            x = x - v
            yield x

    def falling(count):
        return 0.05 * 0.8 ** jnp.asarray(count, jnp.float64)

    assert apart(theirs, oj.Momentum(falling, momentum=0.9), x, gs) < 1e-12
    assert apart(theirs, oj.SGD(falling, momentum=0.9), x, gs) > 0.1


def test_first_step_of_optimistic_adam_is_single_by_default(drawn):
    """Optimisers.jl takes it twice as long: there is no direction before the first."""
    x, gs = drawn
    single, double = (
        np.stack([*ours(oj.OptimisticAdam(b1=0.5, b2=0.9, double_first=d), x, gs)]) - x
        for d in (False, True)
    )
    np.testing.assert_allclose(2 * single[0], double[0], rtol=1e-12)
    np.testing.assert_allclose(double - single, np.tile(single[0], (STEPS, 1, 1)))


def test_jit_goes_the_same_way(drawn):
    """One of them compiled, so that `CASES` may stay outside of `jit`."""
    x, gs = drawn
    model = {"x": jnp.asarray(x)}
    state = oj.setup(oj.Adam(), model)
    update = jax.jit(oj.update)
    for g, right in zip(gs, adam(x, gs), strict=True):
        state, model = update(state, model, {"x": jnp.asarray(g)})
        np.testing.assert_allclose(model["x"], right, rtol=1e-12)
