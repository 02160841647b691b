"""Swap a hand-written optimiser for optimjax and end in the same parameters.

Two loops as people write them in plain JAX, SGD with momentum and Adam, each beside
its optimjax version. Both train the same small network on scikit-learn's digits, on the
same batches, from the same start; what is left over is rounding, and is asserted.

    pip install -e ".[examples]"
    python examples/drop_in.py
"""

import argparse
import difflib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import optimjax as oj

# How far apart any parameter may end, in float32: rounding only.
#
# Adam by hand weighs the new gradient with `1 - 0.999`, which Python makes 0.001, and
# corrects the bias with `0.999**t`, which JAX makes from float32(0.999). They do not
# belong together: 1 - float32(0.999) is off from 0.001 by 1.3e-5 of it. optimjax takes
# both from one float32 number. That is all that is left (with float32 weights by hand
# the loops agree to the last bit on CPU, as SGD does anyway), and training makes 3e-6
# of it, 2e-5 in the worst of eight seeds; b2 = 0.998 or momentum = 0.899 make 5e-3 and
# more. The network is smooth for that: a relu unit that is on in one loop and off in
# the other can make 0.1 of any rounding.
TOLERANCE = 1e-4


def loss(params, x, y):
    logits = predict(params, x)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def predict(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


# --- SGD with momentum ----------------------------------------------------------------


def momentum_by_hand(params, batches):
    velocity = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def step(params, velocity, x, y):
        grads = jax.grad(loss)(params, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity)
        return params, velocity

    for x, y in batches:
        params, velocity = step(params, velocity, x, y)
    return params


def momentum_optimjax(params, batches):
    state = oj.setup(oj.SGD(0.05, momentum=0.9), params)
    step = oj.make_step(loss)

    for x, y in batches:
        state, params, _ = step(state, params, x, y)
    return params


# --- Adam -----------------------------------------------------------------------------


def adam_by_hand(params, batches):
    m = jax.tree.map(jnp.zeros_like, params)
    v = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def step(params, m, v, t, x, y):
        grads = jax.grad(loss)(params, x, y)
        t = t + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + (1 - 0.9) * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + (1 - 0.999) * g**2, v, grads)

        def move(p, m, v):
            m_hat = m / (1 - 0.9**t)
            v_hat = v / (1 - 0.999**t)
            return p - 0.003 * m_hat / (jnp.sqrt(v_hat) + 1e-8)

        return jax.tree.map(move, params, m, v), m, v, t

    t = 0
    for x, y in batches:
        params, m, v, t = step(params, m, v, t, x, y)
    return params


def adam_optimjax(params, batches):
    state = oj.setup(oj.Adam(0.003), params)
    step = oj.make_step(loss)

    for x, y in batches:
        state, params, _ = step(state, params, x, y)
    return params


# --- The comparison -------------------------------------------------------------------


def problem(epochs, hidden=32):
    """Initial parameters, batches of 64 images of 8 x 8 pixels, and images to test."""
    rng = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(images))
    x, y = np.float32(images[order] / 16), np.int32(labels[order])
    picks = [p for _ in range(epochs) for p in rng.permutation(1408).reshape(-1, 64)]

    def layer(n, m):
        w = rng.normal(size=(n, m)) * np.sqrt(2 / n)
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(m)}

    params = {"hidden": layer(64, hidden), "out": layer(hidden, 10)}
    return params, [(x[p], y[p]) for p in picks], (x[1408:], y[1408:])


def lines_changed(before, after):
    """Lines taken out and put in, as a diff counts them."""
    texts = (inspect.getsource(f).splitlines()[1:] for f in (before, after))
    diff = [line[0] for line in difflib.ndiff(*texts) if line[1:].strip()]
    return f"-{diff.count('-')} +{diff.count('+')}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    params, batches, (x, y) = problem(parser.parse_args(argv).epochs)

    def accuracy(params):
        return float(np.mean(np.argmax(predict(params, x), axis=1) == y))

    pairs = {
        "SGD": (momentum_by_hand, momentum_optimjax),
        "Adam": (adam_by_hand, adam_optimjax),
    }
    figures = {}
    print(f"{len(batches)} steps   parameters      test accuracy     lines")
    print("rule        differ by    by hand  optimjax   that differ")
    for rule, (before, after) in pairs.items():
        old, new = before(params, batches), after(params, batches)
        apart = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), old, new)
        difference = max(jax.tree.leaves(apart))
        lines = lines_changed(before, after)
        figures[rule] = (difference, accuracy(old), accuracy(new), lines)
        print("{:8} {:12.1e} {:10.3f} {:9.3f}   {}".format(rule, *figures[rule]))
        if not difference <= TOLERANCE:
            raise SystemExit(f"{rule}: {difference:.1e} apart, over {TOLERANCE:.0e}")
    return figures


if __name__ == "__main__":
    main()
