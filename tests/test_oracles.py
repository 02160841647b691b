"""The newer oracles against optax.contrib's recordings, and against sums by hand.

An oracle is only someone's reading of a paper: these do not know optimjax either.
"""

from functools import partial

import numpy as np
import pytest
from oracles import curvature, descendants, modifiers
from oracles.adam import ORACLES as ADAM
from oracles.adam import adam, decayed, directions
from oracles.leaves import abs_sq
from recordings import recorded, recorded_problem
from test_trajectories import assert_as_recorded, assert_same_way

RECORDS = {r["id"]: r for r in recorded("contrib")["trajectories"]}
HESSIANS = [
    dict(zip(recorded("contrib")["hess"], map(np.array, step), strict=True))
    for step in zip(*recorded("contrib")["hess"].values(), strict=True)
]


def linear(init_value, end_value, transition_steps):
    def schedule(count):
        done = min(count, transition_steps) / transition_steps
        return init_value + (end_value - init_value) * done

    return schedule


# --- optax, step by step --------------------------------------------------------------


def coupled(steps):
    """optax adds its decay to the step per unit of learning rate."""

    def oracle(params, grads, weight_decay=0.0, **settings):
        return decayed(steps)(params, grads, weight_decay=weight_decay, **settings)

    return oracle


def l2(oracle, params, grads, *, weight_decay=0.0, **settings):
    """An oracle asked again for each step, whose gradient knows its parameters."""
    visited, seen = [], []
    for g in grads:
        x = visited[-1] if visited else params
        seen.append({path: g[path] + weight_decay * x[path] for path in g})
        visited = oracle(params, seen, **settings)
    return visited


def optax_sophia(params, grads, *, weight_decay=1e-4, eps=1e-8, **settings):
    """Its decay is outside of the oracle: x <- x - step - learning_rate decay x."""
    words = {"clip_threshold": "clip", "update_interval": "every"}
    settings = {words.get(key, key): value for key, value in settings.items()}
    kind = settings.pop("hessian_diagonal_fn")["$fn"]
    squares = [{path: abs_sq(g) for path, g in step.items()} for step in grads]
    estimates = HESSIANS if kind == "supplied_hess" else squares
    stay = curvature.sophia(
        params, grads, estimates, eps=eps, as_optax=True, **settings
    )
    keep = 1 - settings["learning_rate"] * weight_decay
    before, x, visited = params, params, []
    for there in stay:  # the steps do not depend on the parameters
        x = {path: keep * x[path] - (before[path] - there[path]) for path in x}
        before = there
        visited.append(x)
    return visited


def scheduled_ademamix(gs, *, learning_rate, b3, alpha):
    """Schedules are read at the count from 0; m and v are those of Adam."""
    b3, alpha = linear(**b3["kwargs"]), linear(**alpha["kwargs"])
    slow = 0 * gs[0]
    fast = list(directions(gs))
    roots = list(_roots(gs))
    for count, (g, u, root) in enumerate(zip(gs, fast, roots, strict=True)):
        slow = b3(count) * slow + (1 - b3(count)) * g
        yield learning_rate * (u + alpha(count) * slow / root)


def _roots(gs, b2=0.999, eps=1e-8):
    v = 0.0
    for t, g in enumerate(gs, 1):
        v = b2 * v + (1 - b2) * abs_sq(g)
        yield np.sqrt(v / (1 - b2**t)) + eps


OPTAX = {
    "contrib.ademamix": coupled(descendants.ademamix),
    "contrib.simplified_ademamix": coupled(descendants.simplified_ademamix),
    "contrib.adopt": coupled(descendants.adopt),
    "contrib.acprop": coupled(descendants.acprop),
    "contrib.madgrad": partial(l2, descendants.madgrad),
    "contrib.sophia": optax_sophia,
}


@pytest.mark.parametrize(
    "name", [n for n, r in RECORDS.items() if r["optimizer"] in OPTAX]
)
def test_optax_goes_where_the_oracle_says(name):
    record, settings = RECORDS[name], dict(RECORDS[name]["settings"])
    if settings.pop("nesterov", False):
        pytest.skip("an option of optax alone")
    if not settings.pop("use_clipping", True):
        settings["clip_power"] = None
    oracle = OPTAX[record["optimizer"]]
    if isinstance(settings.get("b3"), dict):
        oracle = coupled(scheduled_ademamix)
    params, grads, _ = recorded_problem(record)
    got = oracle(params, grads, **settings)
    assert_as_recorded({**record, "id": "contrib/"}, got, params)


# --- Other ways to the same numbers ---------------------------------------------------


def wander(seed=7, steps=12):
    """Parameters and gradients that change sign and size."""
    rng = np.random.default_rng(seed)

    def tree():
        return {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}

    sizes = np.exp(rng.normal(size=steps))
    params = tree()
    return params, [{p: size * g for p, g in tree().items()} for size in sizes]


def same(got, expected, params):
    assert_same_way(got, expected, params, rtol=1e-12, eps=1e-15)


def oracle(name, *args, **settings):
    return descendants.ORACLES[name](*args, **settings)


def test_first_steps_by_hand():
    """x = 1, g = 0.5: what the corrections leave of each rule at the first step."""
    x, g = {"x": np.array([[1.0]])}, [{"x": np.array([[0.5]])}]
    by_hand = {
        "ADOPT": 0.0,
        "AdEMAMix": 1e-3 * (0.5 + 5 * 1e-4 * 0.5) / (0.5 + 1e-8),
        "SimplifiedAdEMAMix": 1e-3 * 0.5 / (0.5 + 1e-8),
        "LaProp": 4e-4,
        "MADGRAD": 0.1 * 0.010001 * 0.5 / ((0.010001 * 0.25) ** (1 / 3) + 1e-6),
        "AdamAtan2": 1e-3,
        "StableAdam": 1e-3 * 0.5 / (0.5 + 1e-8),
        # 1e-3 / (0.5 + ...) is far below the upper bound, and above 1e-4, the lower.
        "AdaBound": 1e-3 * np.sqrt(1e-3) / 0.1 / (np.sqrt(2.5e-4) + 1e-8) * 0.05,
        "ACProp": 1e-3 * 0.5,
        "Grams": 1e-3 * 0.5 / (0.5 + 1e-8),
        "Tiger": 1e-3,
        # |cos| of two numbers is 1: nothing is projected.
        "AdamP": 1e-3 * 0.5 / (0.5 + 1e-8),
        "SGDP": 0.1 * 0.5,
    }
    assert set(by_hand) == set(descendants.ORACLES)
    for name, step in by_hand.items():
        [after] = oracle(name, x, g)
        assert 1 - after["x"].item() == pytest.approx(step, rel=1e-9), name


def test_adam_is_the_special_case():
    params, grads = wander()
    adam_ = ADAM["Adam"](params, grads)
    same(oracle("AdEMAMix", params, grads, alpha=0.0), adam_, params)
    same(oracle("AdamP", params, grads, delta=0.0), adam_, params)
    far = oracle("AdaBound", params, grads, gamma=1e-12, final_rate=1e-3)
    # Bounds that are wide apart do not bind; eps is not divided by the correction.
    same(far, oracle("AdaBound", params, grads, gamma=1e-13, final_rate=1e-3), params)
    almost = ADAM["Adam"](params, grads, eps=0.0)
    same(
        oracle("AdaBound", params, grads, eps=0.0, gamma=1e-12, final_rate=1e-3),
        almost,
        params,
    )
    # A large b in atan2 makes the arc as long as its tangent.
    arc = oracle("AdamAtan2", params, grads, a=1e6, b=1e6)
    assert_same_way(arc, almost, params, rtol=1e-11, eps=1e-15)


def test_the_corrected_decay_rates_of_stable_adam_are_a_correction():
    """Gradients of one size and momentum without memory: nothing is clipped."""
    params, grads = wander()
    signs = [{p: np.sign(g) for p, g in step.items()} for step in grads]
    same(
        oracle("StableAdam", params, signs, b2=0.999, weight_decay=0.1),
        ADAM["AdamW"](params, signs, weight_decay=0.1),
        params,
    )


def test_warmup_of_ademamix_ends_at_its_constants():
    """b3 starts next to b1 and alpha next to 0; after T steps both are as given."""
    params, grads = wander()
    one = oracle("AdEMAMix", params, grads, warmup=1, b3=0.99)
    same(one, oracle("AdEMAMix", params, grads, b3=0.99), params)
    long = oracle("AdEMAMix", params, grads, warmup=1e9)
    assert_same_way(long, ADAM["Adam"](params, grads), params, 1e-6, 1e-15)
    # The half-lives ln 0.5 / ln b are linear in t: the authors' way to say it.
    t, T, b1, b3 = 3, 10, 0.9, 0.9999
    half = (1 - t / T) / np.log(b1) + t / T / np.log(b3)
    said = np.log(b1) * np.log(b3) / ((1 - t / T) * np.log(b3) + t / T * np.log(b1))
    assert np.exp(1 / half) == pytest.approx(np.exp(said), rel=1e-12)


def test_a_projected_step_is_tangent():
    """And each column by itself, which the last axis numbers, if all of them may."""
    rng = np.random.default_rng(3)
    x, g = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    g = g - x * np.sum(x * g, axis=0) / np.sum(x * x, axis=0)
    u, projected = descendants.tangent(x, g, rng.normal(size=(5, 3)), 0.1, 0.0)
    assert projected
    np.testing.assert_allclose(np.sum(x * u, axis=0), 0, atol=1e-14)
    # One column leans on x; the rest leans the other way by as much.
    g[:, 0] += x[:, 0]
    g[:, 1] -= x[:, 1] * np.sum(x[:, 0] ** 2) / np.sum(x[:, 1] ** 2)
    u, projected = descendants.tangent(x, g, rng.normal(size=(5, 3)), 0.1, 0.0)
    assert projected
    assert abs(np.sum(x * u)) < 1e-13 < np.max(np.abs(np.sum(x * u, axis=0)))
    g[:, 2] += x[:, 2]
    assert not descendants.tangent(x, g, x, 0.1, 0.0)[1]
    assert not descendants.tangent(x[:, 0], 0 * x[:, 0], x[:, 0], 0.1, 0.0)[1]


def test_modifiers_that_change_nothing():
    params, grads = wander()
    expected = ADAM["Adam"](params, grads, learning_rate=0.03)
    for modified in (
        modifiers.decay(
            params, grads, modifiers.adam, learning_rate=0.03, weight_decay=0.0
        ),
        modifiers.clip_step(params, grads, learning_rate=0.03, max_rms=1e3),
        modifiers.mars(params, grads, learning_rate=0.03, gamma=0, max_norm=np.inf),
    ):
        same(modified, expected, params)
    same(
        modifiers.ams_bound(
            params, grads, partial(modifiers.adam, b2=0.6, eps=0.0), learning_rate=0.03
        ),
        ADAM["AMSGrad"](
            params, grads, learning_rate=0.03, b2=0.6, eps=0.0, debias_v="after"
        ),
        params,
    )


def test_the_forms_of_decay():
    params, grads = wander()
    rates = np.linspace(0.02, 0.05, len(grads))
    adamw = partial(ADAM["AdamW"], params, grads, learning_rate=0.03, weight_decay=0.2)
    go = partial(
        modifiers.decay,
        params,
        grads,
        modifiers.adam,
        learning_rate=0.03,
        weight_decay=0.2,
    )
    same(go(), adamw(), params)
    same(go(how="schedule", peak=0.03), adamw(couple=False), params)
    same(go(how="schedule", peak=1.0), adamw(), params)
    same(go(how="independent", where="w"), adamw(couple=False, decay_where="w"), params)
    same(go(how="corrected", peak=0.03), adamw(), params)
    same(go(how="proximal"), proximal_adam(params, grads, 0.03, 0.2), params)
    same(go(how="l2"), l2(ADAM["Adam"], params, grads, **KW), params)
    # Of plain SGD, the sums by hand for a learning rate that changes.
    x, visited = params["b"], []
    for g, rate in zip(grads, rates, strict=True):
        x = x - rate * g["b"] - rate**2 / 0.05 * 0.2 * x
        visited.append({"b": x})
    b, gs = {"b": params["b"]}, [{"b": g["b"]} for g in grads]
    settings = {"learning_rate": rates, "weight_decay": 0.2, "peak": 0.05}
    same(modifiers.decay(b, gs, how="corrected", **settings), visited, b)


KW = {"learning_rate": 0.03, "weight_decay": 0.2}


def proximal_adam(params, grads, rate, amount):
    xs, visited = dict(params), []
    steps = {p: adam([g[p] for g in grads], learning_rate=rate) for p in params}
    for _ in grads:
        xs = {p: (x - next(steps[p])) / (1 + rate * amount) for p, x in xs.items()}
        visited.append(xs)
    return visited


def test_cautious_steps_by_hand():
    """The second gradient turns one of three numbers around, whose m does not turn."""
    x = {"x": np.zeros(3)}
    gs = [{"x": np.array([1.0, 1.0, 2.0])}, {"x": np.array([1.0, -0.5, 2.0])}]
    u = np.array([1.0, 0.0, 1.0])
    for form, share in (("count", 3 / 3), ("mean", 3 / 2)):
        first, second = modifiers.cautious(x, gs, learning_rate=0.1, form=form)
        moved = (first["x"] - second["x"]) / 0.1
        np.testing.assert_allclose(moved, u * share, rtol=1e-7)
    # All three agree at first: "count" is 3 / 4 of Adam's step.
    [first] = modifiers.cautious(x, gs[:1], learning_rate=0.1)
    np.testing.assert_allclose(first["x"], -0.1 * 3 / 4, rtol=1e-7)


def test_decay_is_cautious_where_step_and_parameter_differ():
    x, g = {"x": np.array([1.0, -1.0, 2.0])}, [{"x": np.array([0.5, 0.5, 0.0])}]
    for how, kept in (("coupled", 0.1 * 0.5), ("independent", 0.5)):
        [after] = modifiers.decay(
            x, g, learning_rate=0.1, weight_decay=0.5, how=how, cautious=True
        )
        right = [1 - 0.05 - kept, -1 - 0.05, 2 - 2 * kept]
        np.testing.assert_allclose(after["x"], right, rtol=1e-12)


def test_mars_by_hand():
    """Gradients 0.3 then 0.5: c = 0.5 + 0.5 (0.5 - 0.3), given to plain SGD."""
    x, gs = {"x": np.array([1.0])}, [{"x": np.array([0.3])}, {"x": np.array([0.5])}]
    go = partial(
        modifiers.mars, x, gs, modifiers.plain, learning_rate=0.1, gamma=0.5, b1=0.5
    )
    first, second = go()
    assert first["x"] - second["x"] == pytest.approx(0.06)
    assert x["x"] - first["x"] == pytest.approx(0.03)
    assert x["x"] - go(zero_first=True)[0]["x"] == pytest.approx(0.045)
    first, second = go(max_norm=0.4)
    assert first["x"] - second["x"] == pytest.approx(0.04)
    first, second = go(old_grads=[gs[0], {"x": np.array([0.1])}])
    assert first["x"] - second["x"] == pytest.approx(0.07)


def test_curvature_by_hand():
    """x = 1, g = 0.5, and a diagonal of 2: its second estimate is not looked at."""
    x, gs = {"x": np.array([1.0])}, 2 * [{"x": np.array([0.5])}]
    curve = [{"x": np.array([2.0])}, {"x": np.array([np.nan])}]
    first, second = curvature.adahessian(x, gs, curve, every=2)
    assert 1 - first["x"] == pytest.approx(0.15 * 0.5 / (2 + 1e-4))
    assert first["x"] - second["x"] == pytest.approx(0.15 * 0.5 / (2 + 1e-4))
    [first] = curvature.adahessian(x, gs[:1], curve, hessian_power=0.5)
    assert 1 - first["x"] == pytest.approx(0.15 * 0.5 / (np.sqrt(2) + 1e-4))
    first, second = curvature.sophia(x, gs, curve, gamma=50.0)
    assert 1 - first["x"] == pytest.approx(1e-3 * 0.035 * 0.5 / (50 * 0.02))
    m = 0.035 * 0.5 * 1.965
    assert first["x"] - second["x"] == pytest.approx(1e-3 * m / (50 * 0.02))
    [first] = curvature.sophia(x, gs[:1], curve)
    assert 1 - first["x"] == pytest.approx(1e-3)
    # Twice the curvature is half the step.
    params, grads = wander()
    ones = [{p: np.ones(g.shape) for p, g in step.items()} for step in grads]
    twos = [{p: 2 * one for p, one in step.items()} for step in ones]
    same(
        curvature.adahessian(params, grads, twos, learning_rate=0.2, eps=0.0),
        curvature.adahessian(params, grads, ones, learning_rate=0.1, eps=0.0),
        params,
    )
