"""Every rule goes where its paper, torch and optax say, step by step.

Three sources that do not know optimjax: the NumPy oracles of `oracles.py`, numbers
recorded from torch and optax in `reference/`, and the optax that is installed. The
gradients are given, not taken from a loss, so a wrong coefficient is not smoothed away.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import ELSEWHERE, SETTINGS, VARIANTS, arithmetic_rules
from oracles import FORETOLD, ORACLES
from oracles.descent import averaged
from recordings import (
    parts_of,
    plain_recordings,
    recorded,
    recorded_problem,
    recordings,
    rule_of,
)

import optimjax as oj

STEPS = 12
RTOL = {64: 1e-10, 32: 1e-5}
# By default DoG measures ways of 1e-6, of which float32 rounds 6 % away in a parameter
# of 1. Its odd options go further.
ONLY_WIDE = {"DoG"}


def oracle_of(cls):
    if cls.__name__ not in ORACLES:
        pytest.fail(
            f"{cls.__name__} has no oracle: write its equations in NumPy, from the "
            "paper, as a function in the file of its family in tests/oracles, and add "
            "it to ORACLES there."
        )
    return ORACLES[cls.__name__]


def build(cls, settings):
    try:
        return cls(**settings)
    except TypeError as error:
        pytest.fail(
            f"{cls.__name__} cannot be built from {settings} ({error}): correct its "
            "entry in tests/cases.py, or give the arguments "
            "without a default one."
        )


def cases():
    """Each rule's settings; those that differ in arithmetic alone need one dtype."""
    for cls in arithmetic_rules():
        name = cls.__name__
        needed = [
            p
            for p in inspect.signature(cls).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        options = SETTINGS.get(name, [])
        options = options if needed and options else [{}, *options]
        variants = VARIANTS.get(name, [])
        for n, settings in enumerate([*options, *variants]):
            settings = settings | FORETOLD.get(name, {})
            yield pytest.param(cls, settings, "real", 64, id=f"{name}-{n}")
            if n < len(options):
                if settings or name not in ONLY_WIDE:
                    yield pytest.param(cls, settings, "real", 32, id=f"{name}-{n}-32")
                if cls.complex_ok:
                    yield pytest.param(
                        cls, settings, "complex", 64, id=f"{name}-{n}-complex"
                    )


def problem(kind, bits, seed=7):
    """Parameters of two ranks, gradients that change sign and size, and losses.

    Names and shapes are those of the recordings, so that nothing compiles twice.
    """
    rng = np.random.default_rng(seed)

    def draw(shape, complex_):
        x = rng.normal(size=shape)
        if complex_:
            return (x + 1j * rng.normal(size=shape)).astype(f"complex{2 * bits}")
        return x.astype(f"float{bits}")

    def tree():
        return {"w": draw((3, 4), kind == "complex"), "b": draw((4,), False)}

    sizes = np.exp(rng.normal(size=STEPS)).astype(f"float{bits}")
    params = tree()
    grads = [{path: size * g for path, g in tree().items()} for size in sizes]
    return params, grads, rng.uniform(0.5, 5.0, size=STEPS)


def train(rule, params, grads, values):
    """The parameters after each step, as NumPy arrays."""
    return [model for model, _ in run(rule, params, grads, values)]


def run(rule, params, grads, values):
    """The parameters as NumPy arrays, and the state, after each step."""
    model = jax.tree.map(jnp.asarray, params)
    state = oj.setup(rule, model)
    # The loops of L-BFGS compile at each call outside of jit.
    update = jax.jit(oj.update) if isinstance(rule, oj.LBFGS) else oj.update
    for g, value in zip(grads, values, strict=True):
        context = {"value": jnp.asarray(value)} if "value" in rule.needs else {}
        g = jax.tree.map(jnp.asarray, g)
        state, model = update(state, model, g, **context)
        yield jax.tree.map(np.asarray, model), state


def foretell(rule, settings, params, grads, values):
    """Where the oracle goes."""
    context = {"values": values} if "value" in rule.needs else {}
    return oracle_of(type(rule))(params=params, grads=grads, **context, **settings)


def assert_same_way(got, expected, start, rtol, eps, slack=None):
    """Close in terms of the way each number went, not of where it stands.

    A step of 1e-3 on a parameter of 1 may be all wrong and yet move it by 1e-3 only.
    Beside `rtol` of the way, each step may round the parameter once. `slack` are
    parameters after each step, too, that are as far from `expected` as is no wonder.
    """
    for path, x0 in start.items():
        ours = np.stack([tree[path] for tree in got])
        right = np.stack([tree[path] for tree in expected])
        way = np.max(np.abs(right - x0), axis=0)
        size = np.max(np.abs(right), axis=0)
        allowed = rtol * way + len(ours) * eps * size
        if slack is not None:
            allowed = allowed + np.abs(np.stack([t[path] for t in slack]) - right)
        error = np.abs(ours - right) / allowed
        error = error.reshape(len(error), -1).max(axis=1)
        assert np.all(error <= 1), (
            f"{path!r}: {error.max():.3g} times as far away as rounding explains, "
            f"for the first time after step {np.argmax(error > 1) + 1}"
        )


def check_oracle(rule, settings, kind, bits):
    """The rule goes where the oracle of its class goes with these settings."""
    with jax.enable_x64(bits == 64):
        params, grads, values = problem(kind, bits)
        got = train(rule, params, grads, values)
    for path, x in params.items():
        assert got[-1][path].dtype == x.dtype
    if bits == 32:  # 1 - 0.9999 is another number there, by 2e-4
        unseen = UNSEEN.get(type(rule).__name__, ())
        right = type(rule)(**settings)
        numbers = {n: h for n, h in right.hypers().items() if n not in unseen}
        settings = settings | {
            n: float(np.float32(h)) for n, h in numbers.items() if isinstance(h, float)
        }
    expected = foretell(rule, settings, params, grads, values)
    eps = np.finfo(f"float{bits}").eps
    # Quasi-Newton steps magnify the rounding of gradients that nearly cancel.
    rounded = [
        {path: g * (1 + 4 * eps * wobble(g)) for path, g in t.items()} for t in grads
    ]
    slack = foretell(rule, settings, params, rounded, values)
    assert_same_way(got, expected, params, RTOL[bits], eps, slack)


def wobble(g):
    return np.random.default_rng(g.size).choice([-1.0, 1.0], size=g.shape)


@pytest.mark.parametrize(("cls", "settings", "kind", "bits"), list(cases()))
def test_rule_follows_its_oracle(cls, settings, kind, bits):
    check_oracle(build(cls, settings), settings, kind, bits)


def test_rules_are_found():
    names = {cls.__name__ for cls in arithmetic_rules()}
    assert {"SGD", "Adam", "AdamW", "ClipByGlobalNorm", "Identity"} <= names
    assert not names & {"Rule", "LeafRule", "Chain", "Partition", "Wrapper"}
    assert set(ORACLES) <= names, "an oracle belongs to no rule"
    assert {*SETTINGS, *VARIANTS} <= names | ELSEWHERE, "odd options belong to no rule"


def test_a_rule_without_an_oracle_fails():
    class Unwritten(oj.LeafRule):
        pass

    with pytest.raises(pytest.fail.Exception, match="Unwritten has no oracle: write"):
        oracle_of(Unwritten)


def test_a_rule_that_cannot_be_built_fails():
    with pytest.raises(pytest.fail.Exception, match=r"SGD cannot be built from \{'lr'"):
        build(oj.SGD, {"lr": 0.1})


# Hyperparameters that no oracle can see: of noise, of a line search, of an average.
UNSEEN = {
    "NoisySGD": {"eta", "gamma"},
    "AddNoise": {"eta", "gamma"},
    "LBFGS": {"c1", "c2"},
    "ASGD": {"t0"},
    "PSGDKron": {"update_probability", "balance_probability"},
    # tests/test_plateau.py has those: thresholds, which 1 % does not move.
    "ReduceOnPlateau": {
        *("patience", "rtol", "atol", "cooldown", "min_scale", "accumulation")
    },
}


@pytest.mark.parametrize("cls", arithmetic_rules(), ids=lambda cls: cls.__name__)
def test_every_hyperparameter_is_noticed(cls):
    """Some case of each rule tells a number from one that is 1 % larger or smaller."""
    noticed, names = set(), set()
    for case in cases():
        other, settings, kind, bits = case.values
        if other is cls and (kind, bits) == ("real", 64):
            rule = build(cls, settings)
            numbers = {n: h for n, h in rule.hypers().items() if isinstance(h, float)}
            names |= set(numbers)
            for name, value in numbers.items():
                wrong = rule.with_fields(**{name: 0.99 * value})
                if name not in noticed and not follows(wrong, settings):
                    noticed.add(name)
    missed = names - noticed - UNSEEN.get(cls.__name__, set())
    assert not missed, (
        f"no case of {cls.__name__} depends on {missed}: add settings in which it "
        "matters to SETTINGS or VARIANTS of tests/cases.py."
    )


def follows(rule, settings):
    try:
        check_oracle(rule, settings, "real", 64)
    except AssertionError:
        return False
    return True


# Without these the tests above might pass whatever the rules do.
WRONG = [
    (oj.SGD, {"momentum": 0.9}, {"momentum": 0.899}),
    (oj.SGD, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9}),
    (oj.Adam, {"learning_rate": 0.1}, {"learning_rate": 0.1, "b2": 0.998}),
    (oj.Adam, {"learning_rate": 0.1}, {"learning_rate": 0.1, "b1": 0.899}),
    (oj.AdamW, {"learning_rate": 0.1}, {"learning_rate": 0.1, "weight_decay": 2e-4}),
    (oj.ClipByGlobalNorm, {}, {"max_norm": 1.001}),
]


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize(
    ("cls", "right", "wrong"), WRONG, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_wrong_hyperparameter_is_noticed(cls, right, wrong, bits):
    check_oracle(cls(**right), right, "real", bits)
    with pytest.raises(AssertionError, match="times as far away as rounding explains"):
        check_oracle(cls(**wrong), right, "real", bits)


# --- Recorded from torch and optax ----------------------------------------------------


def assert_as_recorded(record, got, start, of="params"):
    steps = recorded(record["id"].partition("/")[0])["steps"]
    for path, x0 in start.items():
        right = np.array(record[of][path])
        ours = np.stack([got[step - 1][path] for step in steps])
        way = np.max(np.abs(right - x0), axis=0)
        allowed = record["rtol"] * way + 1e-14 * (1 + np.max(np.abs(right), axis=0))
        error = np.max(np.abs(ours - right) / allowed)
        assert error <= 1, f"{path!r}: {error:.3g} times as far away as allowed"


@pytest.mark.parametrize(("peer", "record"), list(recordings()))
def test_recorded_trajectory(peer, record):
    params, *steps = recorded_problem(record)
    with jax.enable_x64(True):
        got = train(rule_of(peer, record), params, *steps)
    assert_as_recorded(record, got, params)


@pytest.mark.parametrize(("peer", "record"), list(plain_recordings()))
def test_oracle_agrees_with_the_recording(peer, record):
    """So that the oracles are not only someone's reading of a paper."""
    [(cls, settings)] = parts_of(peer, record)
    params, *steps = recorded_problem(record)
    assert_as_recorded(
        record, foretell(cls(**settings), settings, params, *steps), params
    )


AVERAGED = [r for r in recorded("torch")["trajectories"] if "ax" in r]


@pytest.mark.parametrize("record", AVERAGED, ids=lambda record: record["id"])
def test_averages_are_those_of_torch(record):
    """`average` in the state of ASGD is torch's `ax`."""
    params, grads, values = recorded_problem(record)
    rule = rule_of("torch", record)
    with jax.enable_x64(True):
        states = [state for _, state in run(rule, params, grads, values)]
    got = [
        {path: np.asarray(slot.average) for path, slot in s.slots.items()}
        for s in states
    ]
    assert_as_recorded(record, got, params, of="ax")
    [(_, settings)] = parts_of("torch", record)
    assert_as_recorded(record, averaged(params, grads, **settings)[1], params, of="ax")


def test_a_wrong_number_in_a_recording_is_noticed():
    [record] = [
        r for r in recorded("torch")["trajectories"] if r["id"] == "torch/Adam/00"
    ]
    params, *steps = recorded_problem(record)
    for b2, good in ((0.999, True), (0.998, False)):
        with jax.enable_x64(True):
            got = train(oj.Adam(b2=b2), params, *steps)
        if good:
            assert_as_recorded(record, got, params)
        else:
            with pytest.raises(AssertionError, match="times as far away as allowed"):
                assert_as_recorded(record, got, params)


# --- The optax that is installed ------------------------------------------------------


def perceptron(seed=3):
    """A tree of the shape of a small network, and 50 trees of gradients, stacked."""
    rng = np.random.default_rng(seed)
    widths = [7, 5, 3]

    def tree(*lead):
        def draw(*shape):
            return jnp.asarray(rng.normal(size=(*lead, *shape)), jnp.float32)

        pairs = itertools.pairwise(widths)
        return {"layers": [{"kernel": draw(n, m), "bias": draw(m)} for n, m in pairs]}

    return tree(), tree(50)


def optax_way(optimizer, params, grads):
    def step(carry, g):
        state, params = carry
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (state, params), params

    return jax.lax.scan(step, (optimizer.init(params), params), grads)[1]


def our_way(rule, params, grads):
    def step(carry, g):
        state, params = oj.update(*carry, g)
        return (state, params), params

    return jax.lax.scan(step, (oj.setup(rule, params), params), grads)[1]


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTAX_PAIRS = {
    "sgd": (optax.sgd(0.05), oj.SGD(0.05)),
    "momentum": (optax.sgd(0.05, 0.9), oj.SGD(0.05, 0.9)),
    "nesterov": (
        optax.sgd(0.05, momentum=0.8, nesterov=True),
        oj.SGD(0.05, momentum=0.8, nesterov=True),
    ),
    "adam": (optax.adam(0.03), oj.Adam(0.03)),
    "adam-odd": (
        optax.adam(0.03, b1=0.7, b2=0.95, eps=0.02, eps_root=0.01),
        oj.Adam(0.03, b1=0.7, b2=0.95, eps=0.02, eps_root=0.01),
    ),
    "adamw": (optax.adamw(0.03), oj.AdamW(0.03)),
    "adamw-mask": (
        optax.adamw(0.03, weight_decay=0.1, mask=matrices),
        oj.AdamW(0.03, weight_decay=0.1, decay_where="*/kernel"),
    ),
    "clip-adam": (
        optax.chain(optax.clip_by_global_norm(8.0), optax.adam(0.03)),
        oj.Chain(oj.ClipByGlobalNorm(8.0), oj.Adam(0.03)),
    ),
}


@pytest.mark.parametrize(
    ("theirs", "ours"), list(OPTAX_PAIRS.values()), ids=OPTAX_PAIRS
)
def test_same_way_as_optax(theirs, ours):
    params, grads = perceptron()
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        expected = by_path(optax_way(theirs, params, grads))
    got = by_path(our_way(ours, params, grads))
    start = by_path(params)
    assert_same_way(unstack(got), unstack(expected), start, 1e-5, 1.2e-7)


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in leaves}


def unstack(tree):
    return [{path: x[n] for path, x in tree.items()} for n in range(50)]
