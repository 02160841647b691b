"""optimjax and optax in one project, and a run that changes from one to the other.

* A run that begins in optax goes on in optimjax with its moments and its count, and
  ends in the parameters that optax alone would have come to; and the other way round.
* An optax transformation is a rule of optimjax: with ties, missing gradients, freezing.
* A rule of optimjax is an optax transformation: in `optax.chain`, say.

    pip install -e ".[tests]"
    python examples/with_optax.py
"""

import digits
import jax
import jax.numpy as jnp
import optax

import optimjax as oj
from optimjax.interop.optax import (
    from_optax,
    state_from_optax,
    state_to_optax,
    to_optax,
)

HALF = 200
TX, RULE = optax.adamw(3e-3, weight_decay=1e-2), oj.AdamW(3e-3, weight_decay=1e-2)


def first_params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(64, 64), (64, 64), (64, 10)]
    draws = [jax.random.normal(k, s) * 0.15 for k, s in zip(keys, shapes, strict=True)]
    return [{"w": w, "b": jnp.zeros(w.shape[1])} for w in draws]


def predict(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, x, y):
    return digits.cross_entropy(predict(params, x), y)


def in_optax(tx, opt_state, params, seed):
    @jax.jit
    def step(opt_state, params, x, y):
        updates, opt_state = tx.update(jax.grad(loss)(params, x, y), opt_state, params)
        return opt_state, optax.apply_updates(params, updates)

    for x, y in digits.batches(HALF, seed=seed):
        opt_state, params = step(opt_state, params, x, y)
    return opt_state, params


def in_optimjax(state, params, seed):
    step = oj.make_step(loss)
    for x, y in digits.batches(HALF, seed=seed):
        state, params, _ = step(state, params, x, y)
    return state, params


def apart(a, b):
    """The largest difference of any parameter."""
    return max(
        float(jnp.max(jnp.abs(x - y)))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def main():
    digits.versions("optax")
    params = first_params()
    opt_state, middle = in_optax(TX, TX.init(params), params, seed=1)
    _, ends = in_optax(TX, opt_state, middle, seed=2)
    accuracy = digits.report("optax, all the way", predict(ends, digits.x_test))

    state = state_from_optax(oj.setup(RULE, middle), opt_state)
    _, crossed = in_optimjax(state, middle, seed=2)
    there = apart(crossed, ends)
    print(f"optax, then optimjax: parameters differ by {there:.1e}")

    state, middle = in_optimjax(oj.setup(RULE, params), params, seed=1)
    opt_state = state_to_optax(state, middle, TX.init(middle))
    _, crossed = in_optax(TX, opt_state, middle, seed=2)
    back = apart(crossed, ends)
    print(f"optimjax, then optax: parameters differ by {back:.1e}")

    # AdaBelief is optax's here; the two middle layers are one array, and stay one.
    tied = first_params()
    tied[1] = tied[0]
    state = oj.setup(from_optax(optax.adabelief(3e-3)), tied)
    state, tied = in_optimjax(state, tied, seed=1)
    assert tied[1]["w"] is tied[0]["w"]
    digits.report(
        "optax's AdaBelief as a rule, two layers tied", predict(tied, digits.x_test)
    )

    tx = optax.chain(optax.clip_by_global_norm(1.0), to_optax(RULE))
    _, chained = in_optax(tx, tx.init(params), params, seed=1)
    digits.report("our AdamW in optax.chain", predict(chained, digits.x_test))
    return {"accuracy": accuracy, "there": there, "back": back}


if __name__ == "__main__":
    main()
