"""What the wrappers must compute, in float64 NumPy: around SGD, or any given step.

They take other arguments than the oracles of rules, so they stand in no table. A list
of parameters goes over the steps, from after the first.
"""

from collections.abc import Callable

import numpy as np

from oracles.descent import sgd
from oracles.leaves import Params, Steps, norm, wide
from oracles.trees import combine, squared


def mixed(a: Params, b: Params, share) -> Params:
    """(1 - share) a + share b"""
    return {path: (1 - share) * a[path] + share * b[path] for path in a}


def accumulate_sgd_momentum(
    params: Params, micro_grads: Steps, every, learning_rate, momentum
) -> Steps:
    """Parameters after each micro-batch; gradients that are missing have no path.

    sum <- sum + g,  n <- n + 1
    every `every` micro-batches, for the arrays with a gradient in the last of them:
        mean = sum / n,  sum <- 0,  n <- 0
        buf <- mean at the first step, then momentum buf + mean
        x <- x - learning_rate buf
    """
    x, visited, buf = wide(params), [], {}
    total = {path: 0 * array for path, array in x.items()}
    number = dict.fromkeys(x, 0)
    for k, micro in enumerate(map(wide, micro_grads), 1):
        for path, g in micro.items():
            total[path], number[path] = total[path] + g, number[path] + 1
        for path in micro if k % every == 0 else ():
            mean = total[path] / number[path]
            total[path], number[path] = 0 * mean, 0
            buf[path] = momentum * buf[path] + mean if path in buf else mean
            x = {**x, path: x[path] - learning_rate * buf[path]}
        visited.append(x)
    return visited


def sgd_if(
    params: Params, grads: Steps, taken: list[bool], learning_rate, momentum
) -> Steps:
    """SGD which knows nothing of the gradients that are not taken."""
    kept = [g for g, yes in zip(grads, taken, strict=True) if yes]
    moved = sgd(params, kept, learning_rate=learning_rate, momentum=momentum)
    return [([wide(params), *moved])[n] for n in np.cumsum(taken)]


def ema(sequence: Steps, start_params: Params, decay, debias) -> Steps:
    """Averages of a sequence of parameters.

    average <- start_params at first, 0 with `debias`
    average <- decay average + (1 - decay) x
    read as average / (1 - decay^t) with `debias`
    """
    average, read = wide(start_params), []
    if debias:
        average = {path: 0 * x for path, x in average.items()}
    for t, x in enumerate(map(wide, sequence), 1):
        average = mixed(average, x, 1 - decay)
        share = 1 - decay**t if debias else 1
        read.append({path: a / share for path, a in average.items()})
    return read


def swa(sequence: Steps, start, every) -> Steps:
    """Izmailov et al. 2018, arXiv:1803.05407: the mean of those that count so far.

    The t-th counts, from 1, if t = start, start + every, ...; before them, x itself.
    """
    read, counted = [], []
    for t, x in enumerate(map(wide, sequence), 1):
        if t >= start and (t - start) % every == 0:
            counted.append(x)
        among = counted or [x]
        read.append({p: np.mean([tree[p] for tree in among], axis=0) for p in x})
    return read


def lookahead_sgd(
    params: Params, grads: Steps, period, slow_step, learning_rate, momentum
) -> tuple[Steps, Steps]:
    """Zhang et al. 2019, Algorithm 1, arXiv:1907.08610: fast and slow parameters.

    The fast ones are SGD's; after `period` of its steps
    slow <- slow + slow_step (fast - slow),  fast <- slow;  the momentum stays.
    """
    fast = slow = wide(params)
    buf, visited, slows = None, [], []
    for t, g in enumerate(map(wide, grads), 1):
        buf = g if buf is None else combine(g, momentum, buf)
        fast = combine(fast, -learning_rate, buf)
        if t % period == 0:
            slow = mixed(slow, fast, slow_step)
            fast = slow
        visited.append(fast)
        slows.append(slow)
    return visited, slows


def schedule_free(
    params: Params, grads: Steps, base_step: Callable, rates, b1, power
) -> tuple[Steps, Steps, Steps]:
    """Defazio et al. 2024, Algorithm 1, arXiv:2405.15682: the sequences y, x and z.

    The k-th gradient, from 0, is given at y, and rates[k] is the learning rate.
    z <- z - base_step(y, g, k)
    highest <- max(highest, rate),  weight = highest^power,  S <- S + weight
    c = weight / S, 0 if S is 0
    x <- (1 - c) x + c z
    y <- b1 x + (1 - b1) z
    """
    x = y = z = wide(params)
    highest = total = 0.0
    ys, xs, zs = [], [], []
    for k, (g, rate) in enumerate(zip(map(wide, grads), rates, strict=True)):
        z = combine(z, -1, base_step(y, g, k))
        highest = max(highest, rate)
        weight = highest**power
        total += weight
        x = mixed(x, z, weight / total if total > 0 else 0.0)
        y = mixed(z, x, b1)
        for sequence, tree in ((ys, y), (xs, x), (zs, z)):
            sequence.append(tree)
    return ys, xs, zs


def sam_sgd(params: Params, grad_fn: Callable, rhos, learning_rate, momentum) -> Steps:
    """Foret et al. 2021, Algorithm 1, arXiv:2010.01412, one step for each of `rhos`.

    e = rho g / |g|, g the gradient at x, |g| over all arrays together
    buf <- the gradient at x + e at the first step, then momentum buf + that
    x <- x - learning_rate buf
    """
    x, buf, visited = wide(params), None, []
    for rho in rhos:
        g = grad_fn(x)
        g = grad_fn(combine(x, rho / np.sqrt(squared(g)), g))
        buf = g if buf is None else combine(g, momentum, buf)
        x = combine(x, -learning_rate, buf)
        visited.append(x)
    return visited


def monitored(params: Params, grads: Steps, sequence: Steps, decay) -> list[dict]:
    """Running means of |g|, |step|, |x| before the step, and |step| / |x|; by path.

    norms <- the first ones, then decay norms + (1 - decay) norms of this step
    """
    before, means, seen = wide(params), None, []
    for g, after in zip(map(wide, grads), map(wide, sequence), strict=True):
        now = {}
        for path, x in before.items():
            step = norm(x - after[path])
            now[path] = np.array([norm(g[path]), step, norm(x), step / norm(x)])
        means = now if means is None else mixed(means, now, 1 - decay)
        seen.append(means)
        before = after
    return seen
