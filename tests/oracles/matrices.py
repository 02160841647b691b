"""Rules that orthogonalise a matrix x, which is (in, out): one column for an output.

An oracle of this family is made by `on_matrices` from a generator of steps per unit of
learning rate; arrays that are no matrices go the way of `aux`, Adam if nothing is said.
"""

import math

import numpy as np

from oracles.adam import adam
from oracles.leaves import Params, Steps, abs_sq, chosen, each, norm, rms

QUINTIC = ((3.4445, -4.7750, 2.0315),)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
COEFFICIENTS = {"quintic": QUINTIC, "polar_express": POLAR_EXPRESS, "dion": DION}


def aux_steps(aux, gs):
    """Adam, of the given hyperparameters: a dict, or what has a method `hypers`."""
    if aux is None:
        aux = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95}
    return adam(gs, **(aux.hypers() if hasattr(aux, "hypers") else aux))


def on_matrices(directions):
    """x <- x - learning_rate u, with the u's of `directions(gs, **settings)`."""

    def oracle(
        params: Params,
        grads: Steps,
        *,
        learning_rate,
        aux=None,
        matrices=None,
        axes=None,
        **settings,
    ) -> Steps:
        assert axes is None, "no oracle knows of other axes"

        def leaf(path, x, gs):
            if x.ndim == 2 and chosen(matrices, path, x):
                us = directions(gs, **settings)
                steps = (learning_rate * u for u in us)
            else:
                steps = aux_steps(aux, gs)
            for step in steps:
                x = x - step
                yield x

        return each(params, grads, leaf)

    return oracle


def with_rate(oracle, default):
    """`oracle` with its own default of the learning rate."""

    def defaulted(params, grads, *, learning_rate=default, **settings):
        return oracle(params, grads, learning_rate=learning_rate, **settings)

    return defaulted


def ema(b, old, new):
    return b * old + (1 - b) * new


def msign(
    w,
    *,
    iterations=5,
    coefficients="quintic",
    eps=1e-7,
    prescale="frobenius",
):
    """Newton-Schulz towards U V^T of w = U S V^T, see `muon`."""
    if w.shape[0] > w.shape[1]:
        kept = {"iterations": iterations, "coefficients": coefficients}
        return msign(w.conj().T, eps=eps, prescale=prescale, **kept).conj().T
    safety = 1.02 if coefficients == "polar_express" else 1.0
    triples = COEFFICIENTS.get(coefficients, coefficients)
    if prescale == "frobenius":
        x = w / (safety * norm(w) + eps)
    elif prescale == "spectral":
        x = w / (np.linalg.norm(w, ord=2) + eps)
    elif prescale == "aol":
        rows = np.maximum(np.sum(np.abs(w @ w.conj().T), axis=1), eps)
        x = w / np.sqrt(rows)[:, None]
    elif prescale == "schatten":
        x = w / np.sqrt(max(norm(w @ w.conj().T), eps))
    for k in range(iterations):
        a, b, c = triples[min(k, len(triples) - 1)]
        aa = x @ x.conj().T
        x = a * x + (b * aa + c * aa @ aa) @ x
    return x


def size(scale, shape):
    """Muon's factor for the shape of x."""
    n_in, n_out = shape
    return {
        None: 1.0,
        "shape": math.sqrt(max(1, n_out / n_in)),
        "spectral": math.sqrt(n_out / n_in),
        "rms": 0.2 * math.sqrt(max(n_in, n_out)),
    }[scale]


def momenta(gs, momentum, nesterov, debias=False):
    """The matrix that Muon orthogonalises, at each step."""
    m = np.zeros_like(gs[0])
    for t, g in enumerate(gs, 1):
        m = ema(momentum, m, g)
        if nesterov and debias:
            later = momentum * m / (1 - momentum ** (t + 1))
            yield later + (1 - momentum) * g / (1 - momentum**t)
        elif nesterov:
            yield (1 - momentum) * g + momentum * m
        else:
            yield m / (1 - momentum**t) if debias else m


def muon(
    gs,
    *,
    momentum=0.95,
    nesterov=True,
    iterations=5,
    coefficients="quintic",
    scale="shape",
    eps=1e-7,
    debias=False,
    prescale="frobenius",
    dual_norm=False,
):
    """Jordan 2024, "Muon: an optimizer for hidden layers"; 2502.16982 for "rms".

    m <- momentum m + (1 - momentum) g
    w = (1 - momentum) g + momentum m, nesterov; else m
    w = (1 - momentum) g / (1 - momentum^t) + momentum m / (1 - momentum^(t+1)),
        else m / (1 - momentum^t), debias: optax
    X = w / (|w| + eps), transposed while it iterates if it is tall; `iterations` times
    A = X X^T,  X <- a X + (b A + c A A) X
    u = s X,  s = sqrt(max(1, out / in)), sqrt(out / in), 0.2 sqrt(max(in, out)), 1

    Polar Express (arXiv:2505.16932) has a triple for each step, and 1.02 |w| + eps.
    The divisor may be that of optax: the largest singular value, that of each row of
    the "almost orthogonal layer" (arXiv:2512.04632), or of the Schatten 4-norm
    (arXiv:2506.10935). `dual_norm`: u = s <w, X> X, optax.
    torch bounds |w| by eps from below, where eps is added here, as in the first code.
    """
    kept = {"iterations": iterations, "coefficients": coefficients, "eps": eps}
    for w in momenta(gs, momentum, nesterov, debias):
        x = msign(w, prescale=prescale, **kept)
        share = np.sum(w.conj() * x).real if dual_norm else 1.0
        yield size(scale, w.shape) * share * x


def normuon(gs, *, b2=0.95, eps_v=1e-8, scale="shape", **settings):
    """Li et al. 2025, arXiv:2510.05491, around the X of Muon.

    v <- b2 v + (1 - b2) mean of X^2 over the inputs, one number for each output
    y = X / (sqrt(v) + eps_v)
    u = s y |X| / |y|
    The authors' code has 1e-10 for eps_v, and adds it to |y|, too; in the paper the
    last line is 0.2 sqrt(in out) y / |y|.
    """
    v = np.zeros(gs[0].shape[1])
    for x in muon(gs, scale=None, **settings):
        v = ema(b2, v, np.mean(abs_sq(x), axis=0))
        y = x / (np.sqrt(v) + eps_v)
        yield size(scale, x.shape) * y * norm(x) / norm(y)


def adamuon(
    gs,
    *,
    momentum=0.95,
    b2=0.95,
    nesterov=False,
    iterations=5,
    coefficients="quintic",
    eps=1e-7,
    eps_v=1e-8,
    sign=True,
    rms=0.2,
):
    """Si et al. 2025, arXiv:2507.11005; `sign` since its later versions.

    w as in Muon,  X = msign(sign(w)), of w itself without `sign`
    v <- b2 v + (1 - b2) X^2
    y = X / (sqrt(v) + eps_v)
    u = rms sqrt(in out) y / |y|
    The first code has a debiased v with b2 = 0.999: but for eps_v that is no matter.
    """
    v = np.zeros(gs[0].shape)
    for w in momenta(gs, momentum, nesterov):
        w = np.sign(w) if sign else w
        x = msign(w, iterations=iterations, coefficients=coefficients, eps=eps)
        v = ema(b2, v, abs_sq(x))
        y = x / (np.sqrt(v) + eps_v)
        yield rms * math.sqrt(x.size) * y / norm(y)


def scion(
    params: Params,
    grads: Steps,
    *,
    learning_rate=2**-12,
    alpha=0.1,
    radius=50.0,
    norm="auto",
    constrained=False,
    iterations=5,
    coefficients="quintic",
    eps=1e-8,
) -> Steps:
    """Pethick et al. 2025, Algorithms 1 and 2, arXiv:2502.07529.

    d <- (1 - alpha) d + alpha g
    u = radius lmo(d), see `linear_minimiser`
    x <- x - learning_rate u                           unconstrained
    x <- (1 - learning_rate) x - learning_rate u       constrained
    The code calls alpha the momentum. `norm` and `radius` may be dicts of paths,
    or functions of (path, array).
    """
    kept = {"iterations": iterations, "coefficients": coefficients, "eps": eps}

    def at(value, path, x):
        if callable(value):
            return value(path, x)
        return value[path] if isinstance(value, dict) else value

    def leaf(path, x, gs):
        d, keep = 0 * x, 1 - learning_rate if constrained else 1.0
        for g in gs:
            d = ema(1 - alpha, d, g)
            u = at(radius, path, x) * linear_minimiser(d, at(norm, path, x), **kept)
            x = keep * x - learning_rate * u
            yield x

    return each(params, grads, leaf)


def linear_minimiser(d, kind, *, eps, **kept):
    """The largest <u, d> in the ball of a norm; the code's names of the norms.

    "spectral": sqrt(out / in) msign(d)      "sign": sign(d) / in
    "rows": for each output, d / (|d| sqrt(in) + eps)
    "columns": for each input, d / (|d| / sqrt(out) + eps)
    "bias": d / (rms(d) + eps)
    """
    if kind == "auto":
        kind = "spectral" if d.ndim >= 2 else "bias"
    if kind == "bias":
        return d / (rms(d) + eps)
    n_in, n_out = d.shape
    if kind == "spectral":
        return math.sqrt(n_out / n_in) * msign(d, eps=eps, **kept)
    if kind == "sign":
        return np.sign(d) / n_in
    length = np.sqrt(np.sum(abs_sq(d), axis=0 if kind == "rows" else 1, keepdims=True))
    if kind == "rows":
        return d / (length * math.sqrt(n_in) + eps)
    return d / (length / math.sqrt(n_out) + eps)


ORACLES = {
    "Muon": with_rate(on_matrices(muon), 0.02),
    "NorMuon": with_rate(on_matrices(normuon), 0.02),
    "AdaMuon": with_rate(on_matrices(adamuon), 0.02),
    "Scion": scion,
}
