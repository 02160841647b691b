"""optimjax in a Haiku project: `params` go in as they are, and paths choose among them.

Weights decay and biases do not; the last layer learns at half the rate; then all but
the last layer is frozen for the second half of the run.

    pip install -e ".[tests]"
    python examples/with_haiku.py
"""

import digits
import haiku as hk
import jax
import numpy as np

import optimjax as oj

STEPS = 400


def main():
    digits.versions("dm-haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 64, 10])(x)))
    params = net.init(jax.random.key(0), digits.x_test)

    def loss(params, x, y):
        return digits.cross_entropy(net.apply(params, x), y)

    rule = oj.AdamW({"mlp/~/linear_2": 1e-3, "*": 2e-3}, decay_where="*/w")
    state = oj.setup(rule, params)
    print(oj.summary(state))

    step = oj.make_step(loss)
    for x, y in digits.batches(STEPS // 2):
        state, params, _ = step(state, params, x, y)
    half = digits.report("all layers", net.apply(params, digits.x_test), least=0.9)

    body, state = params["mlp/~/linear_0"]["w"], oj.freeze(state, "mlp/~/linear_[01]/*")
    for x, y in digits.batches(STEPS // 2, seed=2):
        state, params, _ = step(state, params, x, y)
    whole = digits.report("and the last alone", net.apply(params, digits.x_test))
    still = bool(np.array_equal(body, params["mlp/~/linear_0"]["w"]))
    print("the frozen layers did not move:", still)
    return {"half": half, "accuracy": whole, "still": still}


if __name__ == "__main__":
    main()
