"""optimjax in a Flax project, in four ways.

* linen with `oj.make_step`: `params` are a pytree like any other;
* linen with Flax's `TrainState`, which wants an optax transformation: `to_optax`;
* NNX with `nnx.Optimizer`: `to_optax` again;
* NNX with `oj.make_step`, on a module that is split into its graph and its parameters,
  with a layer used twice and with the running statistics of a BatchNorm.

    pip install -e ".[tests]"
    python examples/with_flax.py
"""

import digits
import jax
from flax import linen, nnx
from flax.training.train_state import TrainState

import optimjax as oj
from optimjax.interop.optax import to_optax

STEPS = 300
RULE = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.AdamW(3e-3, decay_where=oj.matrices))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(64)(x))
        return linen.Dense(10)(x)


def linen_with_make_step():
    net = Linen()
    params = net.init(jax.random.key(0), digits.x_test)["params"]
    state = oj.setup(RULE, params)
    step = oj.make_step(
        lambda params, x, y: digits.cross_entropy(net.apply({"params": params}, x), y)
    )
    for x, y in digits.batches(STEPS):
        state, params, _ = step(state, params, x, y)
    return net.apply({"params": params}, digits.x_test)


def linen_with_train_state():
    net = Linen()
    params = net.init(jax.random.key(0), digits.x_test)["params"]
    train = TrainState.create(apply_fn=net.apply, params=params, tx=to_optax(RULE))

    @jax.jit
    def step(train, x, y):
        def loss(params):
            return digits.cross_entropy(train.apply_fn({"params": params}, x), y)

        return train.apply_gradients(grads=jax.grad(loss)(train.params))

    for x, y in digits.batches(STEPS):
        train = step(train, x, y)
    return net.apply({"params": train.params}, digits.x_test)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.middle = nnx.Linear(64, 64, rngs=rngs)
        self.again = self.middle  # one layer in two places
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.again(nnx.relu(self.middle(x))))
        return self.last(x)


def nnx_with_optimizer():
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, to_optax(RULE), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return digits.cross_entropy(model(x), y)

        optimizer.update(model, nnx.grad(loss)(model))

    for x, y in digits.batches(STEPS):
        step(model, optimizer, x, y)
    model.eval()
    return model(digits.x_test)


def nnx_with_make_step():
    model = Nnx(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # rest: the statistics
    state = oj.setup(RULE, params)

    def loss(params, rest, x, y):
        net = nnx.merge(graph, params, rest, copy=True)
        value = digits.cross_entropy(net(x), y)
        return value, nnx.split(net, nnx.Param, ...)[2]

    step = oj.make_step(loss, has_aux=True)
    for x, y in digits.batches(STEPS):
        state, params, (_, rest) = step(state, params, rest, x, y)
    nnx.update(model, params, rest)
    model.eval()
    return model(digits.x_test)


def main():
    digits.versions("flax", "optax")
    ways = {
        "linen, make_step": linen_with_make_step,
        "linen, TrainState": linen_with_train_state,
        "NNX, nnx.Optimizer": nnx_with_optimizer,
        "NNX, make_step": nnx_with_make_step,
    }
    return {name: digits.report(name, train()) for name, train in ways.items()}


if __name__ == "__main__":
    main()
