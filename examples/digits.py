"""Scikit-learn's digits, which the `with_*.py` examples train on.

1,797 images of 8 x 8 pixels; 389 of them are kept back for a test.
"""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = np.float32(images[order] / 16), np.int32(labels[order])
x_train, y_train, x_test, y_test = x[:1408], y[:1408], x[1408:], y[1408:]


def batches(steps, size=64, seed=1):
    """Images (size, 64) in [0, 1] and labels (size,), `steps` times."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        picks = rng.integers(len(x_train), size=size)
        yield x_train[picks], y_train[picks]


def cross_entropy(logits, labels):
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    )


def report(what, logits, least=0.95):
    """Print and return the share of test images whose digit has the largest logit."""
    accuracy = float(np.mean(np.argmax(logits, axis=1) == y_test))
    print(f"{what:<52} {accuracy:.1%} of unseen digits right")
    if accuracy < least:
        raise SystemExit(f"{what}: {accuracy:.1%}, expected {least:.0%} at least")
    return accuracy


def versions(*packages):
    print(", ".join(f"{name} {version(name)}" for name in ("jax", *packages)))
