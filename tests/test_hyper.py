"""Hyperparameters are data: of any type, by path, scheduled, swept, differentiated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, close, numpy_adam, same_bits, signatures

import optimjax as oj

MODEL = {"enc": jnp.array([1.0, -2.0, 0.3]), "head": jnp.array([[0.5], [4.0]])}
GRADS = {"enc": jnp.array([0.7, 0.2, -3.0]), "head": jnp.array([[1.5], [-0.25]])}


def loss(model):
    return sum(jnp.sum((x - 0.45) ** 2) / 2 for x in jax.tree.leaves(model))


KINDS = {
    "float": float,
    "int": int,
    "np.float32": np.float32,
    "np.float64": np.float64,
    "np.float16": np.float16,
    "np.int64": np.int64,
    "np 0-d": lambda v: np.array(v, np.float64),
    "bfloat16": lambda v: jnp.asarray(v, jnp.bfloat16),
    "float16": lambda v: jnp.asarray(v, jnp.float16),
    "float32": lambda v: jnp.asarray(v, jnp.float32),
    "weak": lambda v: jnp.asarray(float(v)),
    "jax int": lambda v: jnp.asarray(int(v)),
}
# A value that all of the kinds above can hold, the integers included.
VALUE = 1


def kinds(enabled):
    wide = {"float64": lambda v: jnp.asarray(v, jnp.float64)} if enabled else {}
    return KINDS | wide


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
def test_type_of_a_hyperparameter_changes_neither_dtype_nor_trace(wide, dtype):
    """A NumPy or JAX scalar as rate must not promote steps or recompile."""
    if dtype == "float64" and not wide:
        return
    with jax.enable_x64(wide):
        model = jax.tree.map(lambda x: jnp.asarray(x, dtype), MODEL)
        grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), GRADS)
        update = Counter(oj.update)
        run = jax.jit(update)
        results = []
        for make in kinds(wide).values():
            value = make(VALUE)
            state = oj.setup(oj.SGD(value, weight_decay=value), model)
            after, new = run(state, model, grads)
            assert signatures((after, new)) == signatures((state, model))
            results.append(new)
        assert update.traces == 1
        for other in results[1:]:
            same_bits(other, results[0])


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
def test_steps_have_the_dtype_of_the_parameter_for_every_type_of_rate(wide):
    """`lax.cond` between a step and zeros like the parameter has to type-check."""
    with jax.enable_x64(wide):
        dtypes = ["bfloat16", "float16", "float32"] + ["float64"] * wide
        params = {d: jnp.asarray([1.0, 2.0], d) for d in dtypes}
        for make in kinds(wide).values():
            rule = oj.Adam(make(VALUE))
            _, steps = rule.apply(rule.init(params), params, params)
            assert {d: x.dtype for d, x in steps.items()} == {
                d: x.dtype for d, x in params.items()
            }
        jax.lax.cond(
            jnp.array(True),
            lambda: rule.apply(rule.init(params), params, params)[1],
            lambda: jax.tree.map(jnp.zeros_like, params),
        )


def test_equal_rules_are_equal_whatever_the_type_of_the_number():
    """Rebuilding a rule in each trial of a sweep must hit every cache."""
    with jax.enable_x64(True):
        rules = [oj.SGD(make(VALUE), momentum=0.5) for make in kinds(True).values()]
    for rule in rules:
        assert rule == rules[0] and hash(rule) == hash(rules[0])
    assert oj.SGD(0.5) == oj.SGD(np.float16(0.5)) == oj.SGD(jnp.float32(0.5))
    assert oj.Adam(1e-2) == oj.Adam(1e-2) and hash(oj.Adam(1e-2)) == hash(oj.Adam(1e-2))
    assert oj.Adam(1e-2) != oj.Adam(2e-2)
    assert oj.Adam(1e-2) != oj.AdamW(1e-2)
    assert oj.SGD(0.1) != oj.SGD(0.1, momentum=0.0)
    one = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD({"a": 0.1, "*": 0.2}))
    two = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD({"a": 0.1, "*": 0.2}))
    assert one == two and hash(one) == hash(two)
    assert one != oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD({"a": 0.1, "*": 0.3}))


def test_rebuilt_rules_cost_one_trace():
    """Three trials with a rule built anew: one trace, static or as data."""

    def run(rule, model):
        return oj.update(oj.setup(rule, model), model, GRADS)[1]

    static = Counter(run)
    compiled = jax.jit(static, static_argnums=0)
    for _ in range(3):
        compiled(oj.Adam(1e-2), MODEL)
    assert static.traces == 1
    data = Counter(run)
    compiled = jax.jit(data)
    results = [compiled(oj.Adam(rate), MODEL) for rate in (0.1, 0.2, 0.4)]
    assert data.traces == 1
    for rate, new in zip((0.1, 0.2, 0.4), results, strict=True):
        close(new["enc"], numpy_adam(MODEL["enc"], [GRADS["enc"]], rate))


def test_lowered_program_is_the_same_for_two_rates():
    """A rate in the program text would miss the persistent compilation cache."""
    step = jax.jit(oj.update)
    texts = {
        step.lower(oj.setup(oj.Adam(rate, b2=b2), MODEL), MODEL, GRADS).as_text()
        for rate, b2 in [(0.1, 0.9), (0.37, 0.95)]
    }
    assert len(texts) == 1


def test_changing_hyperparameters_during_a_run_compiles_nothing():
    """A hand-written schedule of rate, b2 and eps may change each of them each step."""

    @chex.assert_max_traces(n=1)
    def counted(model):
        return loss(model)

    chex.clear_trace_counter()
    step = oj.make_step(counted)
    state, model = oj.setup(oj.Adam(0.1), MODEL), MODEL
    kinds = list(KINDS.values())
    for t in range(20):
        rate = kinds[t % len(kinds)](1) if t % 2 else 0.1 / (t + 1)
        state = oj.adjust(
            state,
            learning_rate=rate,
            b2=1 - 1 / (t + 2),
            eps=np.float32(1e-6 * (t + 1)),
        )
        state, model, _ = step(state, model)
    close(oj.hyperparams(state)["enc"]["b2"], np.array(1 - 1 / 21))


def test_traced_and_constant_hyperparameters_agree_to_one_ulp():
    """A rule closed over must train as a rule in the state, step by step."""
    rule = oj.Adam(3e-3, b1=0.87, b2=0.993, eps=1e-7)
    constant = jax.jit(lambda s, x, g: rule.apply(s, x, g))
    traced = jax.jit(lambda rule, s, x, g: rule.apply(s, x, g))
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=50), jnp.float32)}
    state = rule.init(params)
    for _ in range(50):
        grads = {"w": jnp.asarray(rng.normal(size=50), jnp.float32)}
        _, one = constant(state, params, grads)
        state, two = traced(rule, state, params, grads)
        x, y = (np.asarray(params["w"] - steps["w"]) for steps in (one, two))
        assert np.all(np.abs(x - y) <= np.spacing(np.abs(x)))
        params = {"w": jnp.asarray(y)}


def test_low_precision_parameters_do_not_round_the_hyperparameters():
    """b2 = 0.999 is 1 in bfloat16: the first step of Adam would be NaN."""
    for dtype in (jnp.bfloat16, jnp.float16):
        model = {"w": jnp.ones(2, dtype)}
        state = oj.setup(oj.Adam(0.01), model)
        values = oj.hyperparams(state)["w"]
        assert {v.dtype for v in values.values()} == {np.dtype(np.float32)}
        close(values["b2"], np.array(0.999))
        _, new = oj.update(state, model, model)
        close(new["w"], np.asarray(jnp.asarray([0.99, 0.99], dtype)), rtol=0)


def test_schedule_is_a_function_of_the_updates_before():
    """The first update uses count 0: a warm-up from 0 must not skip its first rate."""
    seen = [0, -0.25, -0.5, -0.75, -1, -1]
    linear = lambda count: jnp.minimum(jnp.asarray(count, jnp.float32) / 4, 1)  # noqa: E731
    model = {"w": jnp.zeros(1)}
    grads = {"w": jnp.ones(1)}
    for run in (oj.update, jax.jit(oj.update)):
        state = oj.setup(oj.SGD(linear), model)
        for expected in seen:
            state, new = run(state, model, grads)
            close(new["w"], np.full(1, float(expected)))


@pytest.mark.parametrize(
    "rule",
    [
        lambda f: oj.SGD(0.1, momentum=f),
        lambda f: oj.Adam(0.1, b1=f),
        lambda f: oj.Adam(0.1, b2=f, eps=f),
        lambda f: oj.Chain(oj.WeightDecay(f), oj.Adam({"enc": f, "*": 0.2})),
        lambda f: oj.Chain(oj.ClipByGlobalNorm(f), oj.SGD(oj.by_path(lambda p, x: f))),
    ],
)
def test_every_hyperparameter_can_be_a_schedule(rule):
    """A schedule equals setting its value by hand before each update, in any place."""

    def schedule(count):
        return 0.9 / (jnp.asarray(count, jnp.float32) + 2)

    state, model = oj.setup(rule(schedule), MODEL), MODEL
    update = Counter(oj.update)
    run = jax.jit(update)
    for t in range(3):
        constant = oj.setup(rule(float(schedule(t))), MODEL)
        _, expected = oj.update(
            oj.State(constant.rule, state.inner, state.ties), model, GRADS
        )
        state, model = run(state, model, GRADS)
        close(model, expected)
    assert update.traces == 1


def test_values_by_path_in_one_line():
    """Another rate for one layer is one line, by glob or by function."""
    model = {"enc": jnp.ones(1), "head": jnp.ones(1)}
    for rate in (
        {"enc": 0.1, "head": 0.01},
        {"enc": 0.1, "*": 0.01},
        {"h*": 0.01, "*": 0.1},
        oj.by_path(lambda path, leaf: 0.1 if path == "enc" else 0.01),
        {"enc": lambda count: 0.1, "*": np.float32(0.01)},
    ):
        _, new = oj.update(oj.setup(oj.SGD(rate), model), model, model)
        close(new, {"enc": np.full(1, 0.9), "head": np.full(1, 0.99)})


def test_values_by_path_stay_data():
    """A rate by path can be changed and swept like one number, without a trace."""
    update = Counter(oj.update)
    run = jax.jit(update)
    for a, b in [(0.1, 0.2), (0.3, 0.4), (np.float64(0.5), 1)]:
        state = oj.setup(oj.SGD({"enc": a, "*": b}), MODEL)
        _, new = run(state, MODEL, GRADS)
        close(new["head"], MODEL["head"] - float(b) * GRADS["head"])
        close(new["enc"], MODEL["enc"] - float(a) * GRADS["enc"])
    assert update.traces == 1


def test_vmap_over_rates_equals_as_many_runs():
    """A sweep is one `vmap`, from `setup` on."""
    rates = jnp.logspace(-3, 0, 8)

    def train(rate):
        state, model = oj.setup(oj.Adam(rate, b1=0.8), MODEL), MODEL
        for _ in range(3):
            state, model = oj.update(state, model, jax.grad(loss)(model))
        return state, model

    states, models = jax.jit(jax.vmap(train))(rates)
    run = jax.jit(train)
    for i, rate in enumerate(rates):
        close(
            jax.tree.map(lambda x, i=i: x[i], (states, models)), run(rate), 1e-5, 1e-6
        )


def test_vmap_over_adjusted_states():
    """A sweep may start in the middle of a run, from one state."""
    state, model = oj.update(oj.setup(oj.Adam(0.1), MODEL), MODEL, GRADS)
    rates = jnp.array([0.01, 0.1, 0.5])

    def one(rate):
        return oj.update(oj.adjust(state, learning_rate=rate), model, GRADS)[1]

    many = jax.vmap(one)(rates)
    for i, rate in enumerate(rates):
        close(jax.tree.map(lambda x, i=i: x[i], many), one(rate))


@pytest.mark.parametrize(
    "build",
    [
        lambda h: oj.Adam(h),
        lambda h: oj.Adam(0.1, b1=h),
        lambda h: oj.Adam(0.1, b2=h),
        lambda h: oj.Adam(0.1, eps=h),
        lambda h: oj.SGD({"enc": h, "*": 0.1}, momentum=0.5, nesterov=True),
        lambda h: oj.SGD(0.1, momentum=h),
        lambda h: oj.Chain(oj.ClipByGlobalNorm(h), oj.SGD(lambda count: 2 * h)),
        lambda h: oj.AdamW(0.1, weight_decay=h),
    ],
)
def test_gradient_with_respect_to_a_hyperparameter(build, x64):
    """Rates can be learned: `grad` through the run equals finite differences."""
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), MODEL)

    @jax.jit
    def after(value):
        state, model = oj.setup(build(value), start), start
        for _ in range(3):
            state, model = oj.update(state, model, jax.grad(loss)(model))
        return loss(model)

    h = 0.35
    slope = jax.grad(after)(h)
    finite = (after(h + 1e-5) - after(h - 1e-5)) / 2e-5
    assert abs(finite) > 1e-6
    np.testing.assert_allclose(slope, finite, rtol=1e-6)


def test_gradient_with_respect_to_the_rate_where_the_gradient_is_zero(x64):
    """Rows of an embedding that no batch uses must not make a learned rate NaN.

    The root has no slope at 0; `eps_root` is the documented way out.
    """
    model = {"w": jnp.array([1.0, 2.0])}
    grads = {"w": jnp.array([0.0, 1.0])}

    def after(rate):
        state = oj.setup(oj.Adam(rate, eps_root=1e-12), model)
        return jnp.sum(oj.update(state, model, grads)[1]["w"])

    close(jax.grad(after)(0.1), np.array(-1.0))


def test_only_numbers_are_data():
    """Each field is declared numeric or structural by the rule, not by the user."""
    rule = oj.SGD(0.3, momentum=0.9, nesterov=True, maximize=True)
    assert sorted(jax.tree.leaves(rule)) == [0.0, 0.3, 0.9]
    halved = jax.tree.map(lambda x: x / 2, rule)
    assert halved == oj.SGD(0.15, momentum=0.45, nesterov=True, maximize=True)
    fresh = jax.jit(lambda rule, x: rule.apply(rule.init(x), x, x)[1])(rule, MODEL)
    close(fresh, jax.tree.map(lambda x: -0.3 * 1.9 * x, MODEL))
    state = oj.setup(oj.AdamW(0.1, decay_where="enc", couple=False), MODEL)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


def test_traced_value_is_not_checked_but_used():
    """A range check must not stop a rate that is an argument of a `jit`."""

    @jax.jit
    def run(rate, max_norm):
        rule = oj.Chain(oj.ClipByGlobalNorm(max_norm), oj.SGD(rate))
        return oj.update(oj.setup(rule, MODEL), MODEL, GRADS)[1]

    close(run(0.25, 1e6), jax.tree.map(lambda x, g: x - 0.25 * g, MODEL, GRADS))


def test_what_counts_or_is_positive_needs_no_range():
    @oj.rule
    class Counting(oj.LeafRule):
        whole = ("steps",)
        positive = ("width",)

        steps: oj.Hyper = 1
        width: oj.Hyper = 1.0
        offset: oj.Hyper = 0.0

    Counting(offset=-3.0)
    for wrong, complaint in [
        ({"steps": 1.5}, "steps is 1.5, expected a whole number"),
        ({"steps": -1}, "steps is -1, expected >= 0"),
        ({"width": 0.0}, "width is 0, expected more"),
        ({"width": -1.0}, "width is -1, expected >= 0"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            Counting(**wrong)
    with pytest.raises(ValueError, match="Shampoo: eps is 0, expected more"):
        oj.Shampoo(eps=0.0)  # which is the root of 0, inverted
    with pytest.raises(ValueError, match=r"eta_plus is 0\.5, expected >= 1"):
        oj.Rprop(eta_plus=0.5)


def test_rules_alone_work_on_any_tree():
    """A rule is two pure functions over any pytree, without `setup`."""
    params = {"a": {"b": jnp.array([1.0, 2.0])}, "c": (jnp.array(3.0), None)}
    for rule in (oj.Adam(0.1), oj.Chain(oj.ClipByGlobalNorm(9.0), oj.Adam(0.1))):
        _, steps = rule.apply(rule.init(params), params, params)
        assert jax.tree.structure(steps) == jax.tree.structure(params)
        close(steps, jax.tree.map(lambda x: np.full(x.shape, 0.1), params))
        bare = jnp.array([1.0, -2.0])
        _, step = rule.apply(rule.init(bare), bare, bare)
        close(step, np.array([0.1, -0.1]))


def test_setup_and_adjust_keep_the_users_rule():
    """One rule sets up many runs: none of them may change it."""
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD({"enc": 0.1, "*": 0.2}))
    before = repr(rule)
    state = oj.setup(rule, MODEL)
    oj.adjust(state, learning_rate=0.5)
    oj.update(state, MODEL, GRADS)
    assert repr(rule) == before
    other = {"enc": jnp.ones(1), "deep": {"net": jnp.ones(1)}}
    _, new = oj.update(
        oj.setup(rule, other), other, jax.tree.map(lambda x: x / 4, other)
    )
    close(new["deep"]["net"], np.full(1, 1 - 0.05))


def test_a_schedule_starts_at_its_value_for_count_zero():
    """The first step must take the schedule's first value, not its second."""
    rule = oj.SGD(lambda count: jnp.minimum(count / 4, 1))
    model = {"w": jnp.zeros(())}
    state, steps = oj.setup(rule, model), []
    for _ in range(6):
        state, new = oj.update(state, model, {"w": jnp.ones(())})
        steps.append(float(new["w"] - model["w"]))
        model = new
    assert steps == [0, -0.25, -0.5, -0.75, -1, -1]
