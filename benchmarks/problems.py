"""What is trained, not only updated: two small problems on data that is at hand."""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Not `from examples import ...`: some distribution may have installed such a package.
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import tied_lm

TEXT = tied_lm.Settings(width=32, layers=2, context=32, batch=16, held_out=128)


class Problem(NamedTuple):
    """Attributes:
    init: the model, from a key.
    loss: a scalar, of (model, *batch).
    batches: that many batches, with a leading axis for them, from (key, count).
    held_out: one batch of what is never trained on.
    unit: of the loss.
    steps: what a run takes by default.
    """

    init: Callable[[Any], Any]
    loss: Callable[..., Any]
    batches: Callable[[Any, int], tuple[Any, ...]]
    held_out: tuple[Any, ...]
    unit: str
    steps: int


def text() -> Problem:
    """The tied transformer of `examples/tied_lm.py`, smaller, on Python's library."""
    s = TEXT
    training, validation = tied_lm.read_corpus(s.corpus)
    last = len(validation) - s.context - 1
    starts = jnp.linspace(0, last, s.held_out).astype(int)
    held_out = tied_lm.windows(jnp.asarray(validation), starts, s.context)
    corpus = jnp.asarray(training)

    def batches(key: Any, count: int) -> tuple[Any, ...]:
        shape, end = (count, s.batch), len(training) - s.context
        starts = jax.random.randint(key, shape, 0, end)
        return (tied_lm.windows(corpus, starts, s.context),)

    def init(key: Any) -> Any:
        return tied_lm.init_model(key, s)

    return Problem(init, tied_lm.loss, batches, (held_out,), "bits per byte", 400)


def init_net(key: Any, widths: tuple[int, int] = (16, 32)) -> Any:
    """Two convolutions with HWIO kernels and a dense layer, for 8 x 8 pixels."""
    first, second = widths
    shapes = {
        "first": (3, 3, 1, first),
        "second": (3, 3, first, second),
        "dense": (4 * 4 * second, 10),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: {
            "kernel": math.sqrt(2 / math.prod(shape[:-1]))
            * jax.random.normal(k, shape),
            "bias": jnp.zeros(shape[-1]),
        }
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def net_loss(model: Any, images: Any, labels: Any) -> Any:
    """Cross-entropy of images (batch, 8, 8, 1) in [0, 1]."""
    x = images
    for name, stride in (("first", 1), ("second", 2)):
        x = jax.lax.conv_general_dilated(
            x,
            model[name]["kernel"],
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x + model[name]["bias"])
    x = x.reshape(x.shape[0], -1) @ model["dense"]["kernel"] + model["dense"]["bias"]
    log_p = jax.nn.log_softmax(x)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))


def digits() -> Problem:
    """A convolutional net on scikit-learn's digits, split as `examples/digits.py`."""
    import digits as data  # reads the images, which not everyone asks for

    def images(x: Any) -> Any:
        return jnp.asarray(x).reshape(-1, 8, 8, 1)

    x, y = images(data.x_train), jnp.asarray(data.y_train)

    def batches(key: Any, count: int) -> tuple[Any, ...]:
        picks = jax.random.randint(key, (count, 32), 0, len(x))
        return x[picks], y[picks]

    held_out = images(data.x_test), jnp.asarray(data.y_test)
    return Problem(init_net, net_loss, batches, held_out, "nats", 200)


PROBLEMS = {"text": functools.cache(text), "digits": functools.cache(digits)}
