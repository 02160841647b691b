"""What the oracles of matrix rules must be like, whatever their papers say besides."""

from itertools import pairwise

import numpy as np
import pytest
from oracles import kronecker, matrices, matrices_low_rank
from oracles.leaves import norm, rms
from oracles.tuning import adam_steps, mechanic, sgd_steps, trac

RNG = np.random.default_rng(5)
WIDE = [RNG.normal(size=(3, 4)) for _ in range(8)]
TALL = [g.T for g in WIDE]


def orthogonal(n):
    return np.linalg.qr(RNG.normal(size=(n, n)))[0]


def singular_values(x):
    return np.linalg.svd(x, compute_uv=False)


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express", "dion"])
@pytest.mark.parametrize("g", [WIDE[0], TALL[0]], ids=["wide", "tall"])
def test_msign_keeps_the_vectors_and_makes_the_values_one(g, coefficients):
    x = matrices.msign(g, coefficients=coefficients)
    assert np.all(np.abs(singular_values(x) - 1) < 0.35)
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    turned = u.T @ x @ vt.T
    np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-12)


@pytest.mark.parametrize("prescale", ["spectral", "aol", "schatten"])
def test_other_divisors_are_at_least_the_largest_singular_value(prescale):
    for g in (WIDE[0], TALL[0]):
        x = matrices.msign(g, iterations=0, prescale=prescale)
        assert 0.2 < singular_values(x)[0] < 1 + 1e-6


def test_muon_turns_with_its_gradients():
    left, right = orthogonal(3), orthogonal(4)
    turned = [left @ g @ right for g in WIDE]
    pairs = zip(matrices.muon(turned), matrices.muon(WIDE), strict=True)
    for got, u in pairs:
        np.testing.assert_allclose(got, left @ u @ right, atol=1e-10)


def test_sizes_of_normalised_muons():
    for u, x in zip(matrices.normuon(WIDE), matrices.muon(WIDE), strict=True):
        assert norm(u) == pytest.approx(norm(x))
    for u in matrices.adamuon(WIDE, rms=0.2):
        assert rms(u) == pytest.approx(0.2)
    first = next(matrices.normuon(WIDE, scale=None))
    lengths = np.sqrt(np.sum(first**2, axis=0))
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-6)  # all outputs alike


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sign", [[1 / 2, -1 / 2], [1 / 2, 0]]),
        ("rows", [[3 / 5 / 2**0.5, -1 / 2**0.5], [4 / 5 / 2**0.5, 0]]),
        ("columns", [[3 / 5**0.5, -1 / 5**0.5], [2**0.5, 0]]),
        ("bias", [[3 / 6.5**0.5, -1 / 6.5**0.5], [4 / 6.5**0.5, 0]]),
    ],
)
def test_first_step_of_scion(kind, expected):
    d = np.array([[3.0, -1.0], [4.0, 0.0]])
    u = matrices.linear_minimiser(d, kind, eps=0.0)
    np.testing.assert_allclose(u, expected, atol=1e-12)


def test_soap_takes_no_first_step_and_then_is_adam_in_a_basis():
    """Gradients that are all diagonal in one basis have it from the first on."""
    left, right = orthogonal(3), orthogonal(3)
    scales = [np.diag([3.0, 2.0, 1.0]) * RNG.uniform(1, 1.2) for _ in range(6)]
    gs = [left @ s @ right.T for s in scales]
    us = list(kronecker.soap(gs, every=1, b1=0.9, b2=0.8))
    assert not np.any(us[0])
    m = v = 0.0
    for k, (s, u) in enumerate(zip(scales[1:], us[1:], strict=True), 1):
        m, v = 0.9 * m + 0.1 * s, 0.8 * v + 0.2 * s**2
        m_hat, v_hat = m / (1 - 0.9**k), v / (1 - 0.8**k)
        expected = left @ (m_hat / (np.sqrt(v_hat) + 1e-8)) @ right.T
        np.testing.assert_allclose(u, expected, atol=1e-6)


def test_soap_without_a_basis_is_adam_from_the_second_gradient_on():
    us = list(kronecker.soap(WIDE, max_dim=2, b1=0.9, b2=0.8))
    steps = adam_steps([{"w": g} for g in WIDE[1:]], learning_rate=1.0, b1=0.9, b2=0.8)
    for u, step in zip(us[1:], steps, strict=True):
        np.testing.assert_allclose(u, step["w"], atol=1e-7)


def test_soap_one_sided_turns_the_shorter_side():
    flip = orthogonal(3)
    for u, turned in zip(
        kronecker.soap(WIDE, one_sided=True, every=2),
        kronecker.soap([flip @ g for g in WIDE], one_sided=True, every=2),
        strict=True,
    ):
        np.testing.assert_allclose(turned, flip @ u, atol=1e-8)


def test_shampoo_of_diagonal_gradients_divides_by_a_root_of_sums_of_squares():
    """L^(-1/4) g R^(-1/4), L = R = diag(sum g^2): AdaGrad on the diagonal."""
    gs = [np.diag(RNG.normal(size=3)) for _ in range(5)]
    us = kronecker.shampoo(gs, b1=0.0, b2=1.0, eps=0.0, start=0, graft=None)
    total = 0.0
    for g, u in zip(gs, us, strict=True):
        total = total + np.diag(g) ** 2
        np.testing.assert_allclose(u, np.diag(np.diag(g) / np.sqrt(total)), atol=1e-12)


def test_grafts_give_shampoo_a_length():
    settings = {"b1": 0.0, "nesterov": False, "start": 2}
    us = list(kronecker.shampoo(WIDE, graft="sgd", **settings))
    for t, (g, u) in enumerate(zip(WIDE, us, strict=True), 1):
        assert norm(u) == pytest.approx(norm(g))
        assert np.allclose(u, g) == (t <= 2)
    for u in kronecker.shampoo(WIDE, graft="sign", **settings):
        assert norm(u) == pytest.approx(np.sqrt(u.size))


def test_blocks_of_shampoo_know_nothing_of_each_other():
    settings = {"graft": None, "start": 0, "b1": 0.5}
    whole = kronecker.shampoo(WIDE, block_size=2, **settings)
    corner = kronecker.shampoo([g[:2, 2:] for g in WIDE], **settings)
    for u, part in zip(whole, corner, strict=True):
        np.testing.assert_allclose(u[:2, 2:], part)


def test_splus_has_steps_of_one_size():
    first, *others = kronecker.splus(WIDE, every=3)
    np.testing.assert_allclose(first, 2 / 7 * np.sign(WIDE[0]))
    for u in others:
        assert norm(u) == pytest.approx(2 / 7 * np.sqrt(12))


def test_psgd_whitens_what_it_is_given():
    """The preconditioned gradient of a constant covariance tends to a unit one."""
    left = np.diag([3.0, 1.0, 0.3])
    gs = [left @ RNG.normal(size=(3, 4)) for _ in range(800)]
    draws = [(RNG.normal(size=(3, 4)), 0.0, 0.5) for _ in gs]
    us = list(kronecker.psgd_kron(gs, b1=0.0, max_rms=1e9, draws=draws))
    late = np.mean([u @ u.T / 4 for u in us[400:]], axis=0)
    np.testing.assert_allclose(late, np.eye(3), atol=0.35)


def test_dion_of_full_rank_has_orthonormal_steps_if_columns_do_not_shrink():
    for u in matrices_low_rank.dion(WIDE, rank=3):
        assert singular_values(u)[0] <= np.sqrt(4 / 3) * np.sqrt(3) + 1e-9
        assert norm(u) == pytest.approx(np.sqrt(4 / 3) * np.sqrt(3))


def test_galore_of_full_rank_is_adam_in_a_basis():
    us = matrices_low_rank.galore(WIDE, rank=3, scale=1.0)
    p = matrices_low_rank.singular_vectors(WIDE[0], 3)
    steps = adam_steps([{"w": p.T @ g} for g in WIDE], learning_rate=1.0)
    for u, step in zip(us, steps, strict=True):
        np.testing.assert_allclose(u, p @ step["w"], atol=1e-12)


@pytest.mark.parametrize("name", ["galore", "fira", "apollo"])
def test_low_rank_rules_do_not_mind_the_side(name):
    rule = getattr(matrices_low_rank, name)
    for u, turned in zip(rule(WIDE, rank=2), rule(TALL, rank=2), strict=True):
        np.testing.assert_allclose(u, turned.T, atol=1e-10)


def test_fira_of_full_rank_is_galore():
    settings = {"rank": 3, "scale": 0.7, "every": 2}
    for u, v in zip(
        matrices_low_rank.fira(WIDE, **settings),
        matrices_low_rank.galore(WIDE, **settings),
        strict=True,
    ):
        np.testing.assert_allclose(u, v, atol=1e-8)


def test_apollo_scales_columns_and_grows_slowly():
    us = list(matrices_low_rank.apollo(WIDE, rank=2, max_growth=1.01))
    for g, u in zip(WIDE, us, strict=True):
        np.testing.assert_allclose(np.ptp(u / g, axis=0), 0, atol=1e-10)
    for before, u in pairwise(us):
        assert norm(u) <= 1.0101 * norm(before)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (4,)])
def test_blocks_of_adam_mini(shape):
    a = RNG.uniform(size=shape)
    means = matrices_low_rank.block_means
    assert np.ptp(means(a, "array")) < 1e-12
    np.testing.assert_allclose(means(a, "elements"), a)
    if len(shape) > 1:
        np.testing.assert_allclose(means(a, 4), means(a, "outputs"))
        np.testing.assert_allclose(means(a, 1), means(a, "array"))
        np.testing.assert_allclose(means(a, "outputs")[0, ..., 1], a[..., 1].mean())
        np.testing.assert_allclose(means(a, "inputs")[1], a[1].mean())
        np.testing.assert_allclose(means(a, 2)[..., :2], a[..., :2].mean())


def test_came_of_matrices_of_rank_one():
    """A squared gradient of rank one is what two factors can keep."""
    g = np.outer([1.0, 2.0, 3.0], [1.0, -1.0, 2.0, 0.5])
    [step] = matrices_low_rank.came([g], learning_rate=1.0, b1=0.5, b2=0.0, b3=0.0)
    # u = sign(g), m = u / 2, (u - m)^2 = 1 / 4, m / sqrt(1 / 4) = sign(g)
    np.testing.assert_allclose(step, np.sign(g), rtol=1e-6)


def test_came_of_vectors_has_no_instability():
    [step] = matrices_low_rank.came([np.array([3.0, -4.0])], learning_rate=1.0, b2=0.96)
    # u = g / sqrt(0.04 g^2) = 5 sign(g), of RMS 1 at most; m = u / 10
    np.testing.assert_allclose(step, [0.1, -0.1])


def test_tuners_stay_near_at_first_and_find_the_scale():
    """A constant gradient: |x - x0| must grow beyond any power of the first scale."""
    params, grads = {"w": np.ones(3)}, [{"w": np.array([1.0, -1.0, 0.5])}] * 150
    steps = sgd_steps(grads, learning_rate=1.0)
    for tuner in (mechanic, trac):
        visited = tuner(params, grads, steps=steps)
        far = [norm(x["w"] - params["w"]) for x in visited]
        assert far[0] < 1e-5 and far[-1] > 100 * far[0]
        assert np.dot(visited[-1]["w"] - params["w"], grads[0]["w"]) < 0
