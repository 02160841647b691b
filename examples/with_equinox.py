"""optimjax in an Equinox project: whole modules, no filter, no partition.

A residual network applies one layer four times. In Equinox the layer is one object in
four places of the module; here it is one slot, with one gradient, and stays one object.

    pip install -e ".[tests]"
    python examples/with_equinox.py
"""

import digits
import equinox as eqx
import jax
import jax.numpy as jnp

import optimjax as oj

STEPS = 400


class Net(eqx.Module):
    first: eqx.nn.Linear
    blocks: list
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, key, width=64):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(64, width, key=keys[0])
        self.blocks = [eqx.nn.Linear(width, width, key=keys[1])] * 4  # one layer
        self.norm = eqx.nn.LayerNorm(width)
        self.last = eqx.nn.Linear(width, 10, key=keys[2])

    def __call__(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + jax.nn.gelu(block(self.norm(h)))
        return self.last(h)


def loss(model, x, y):
    return digits.cross_entropy(jax.vmap(model)(x), y)


def main():
    digits.versions("equinox")
    model = Net(jax.random.key(0))
    state = oj.setup(oj.AdamW(3e-3, decay_where=oj.matrices), model)
    print(state.ties)

    # The step that most projects want. Gradients are taken of all inexact arrays.
    step = oj.make_step(loss)
    for x, y in digits.batches(STEPS // 2):
        state, model, _ = step(state, model, x, y)

    # A step of your own: Equinox's gradients go in as they are.
    @eqx.filter_jit
    def own_step(state, model, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        state, model = oj.update(state, model, grads)
        return state, model, value

    for x, y in digits.batches(STEPS // 2, seed=2):
        state, model, _ = own_step(state, model, x, y)

    tied = all(jnp.array_equal(b.weight, model.blocks[0].weight) for b in model.blocks)
    print("the four blocks hold the same numbers:", tied)
    accuracy = digits.report("a layer used four times", jax.vmap(model)(digits.x_test))
    return {"tied": tied, "accuracy": accuracy}


if __name__ == "__main__":
    main()
