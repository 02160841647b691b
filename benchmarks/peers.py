"""Who updates: optimjax, optax, a loop written by hand, torch, and memory at its best.

Every peer is a function of a rule's name and of `{name: array}` that returns a `Run`,
or None if it has no such rule. All use the same numbers.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optimjax as oj

Arrays = dict[str, jax.Array]

LR, DECAY, CLIP = 1e-3, 1e-2, 1.0

OURS = {
    "SGDm": lambda lr=LR: oj.SGD(lr, momentum=0.9),
    "Adam": lambda lr=LR: oj.Adam(lr),
    "AdamW": lambda lr=LR: oj.AdamW(lr, weight_decay=DECAY),
    "Lion": lambda lr=LR: oj.Lion(lr, weight_decay=DECAY),
    "clip+AdamW": lambda lr=LR: oj.Chain(
        oj.ClipByGlobalNorm(CLIP), oj.AdamW(lr, weight_decay=DECAY)
    ),
}
OPTAX = {
    "SGDm": lambda lr=LR: optax.sgd(lr, momentum=0.9),
    "Adam": lambda lr=LR: optax.adam(lr),
    "AdamW": lambda lr=LR: optax.adamw(lr, weight_decay=DECAY),
    "Lion": lambda lr=LR: optax.lion(lr, weight_decay=DECAY),
    "clip+AdamW": lambda lr=LR: optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(lr, weight_decay=DECAY)
    ),
}
# Words of float32 state that a rule must read and write for each number, and passes
# over the gradient; the parameter is read and written once.
STATE_WORDS = {"SGDm": 2, "Adam": 4, "AdamW": 4, "Lion": 2, "clip+AdamW": 4}
GRADIENT_READS = {"SGDm": 1, "Adam": 1, "AdamW": 1, "Lion": 1, "clip+AdamW": 2}


class Run(NamedTuple):
    """An optimiser at work on a model.

    Attributes:
        carry: what goes from update to update.
        step: jitted function (carry, gradients) -> carry, which donates the carry; for
            torch a plain one.
        params: the parameters in a carry, by name.
        scale: what the measured time is multiplied by.
        tracing: context in which `step` is traced.
    """

    carry: Any
    step: Callable[[Any, Any], Any]
    params: Callable[[Any], Any]
    scale: float = 1.0
    tracing: Callable[[], Any] | None = None


def donating(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return jax.jit(function, donate_argnums=0)


def optimjax(rule: str, model: Arrays) -> Run:
    def step(carry: Any, grads: Any) -> Any:
        return oj.update(*carry, grads)

    carry = (oj.setup(OURS[rule](), model), model)
    return Run(carry, donating(step), lambda carry: carry[1])


def optimjax_xla(rule: str, model: Arrays) -> Run:
    """Without the compiled loops: what a GPU or TPU gets."""
    return optimjax(rule, model)._replace(tracing=oj.kernels.off)


def by_optax(tx: Any, carry: Any, grads: Any) -> Any:
    opt_state, params = carry
    updates, opt_state = tx.update(grads, opt_state, params)
    return opt_state, optax.apply_updates(params, updates)


def optax_(rule: str, model: Arrays) -> Run:
    tx = OPTAX[rule]()
    step = donating(functools.partial(by_optax, tx))
    return Run((tx.init(model), model), step, lambda carry: carry[1])


def by_hand(rule: str, model: Arrays) -> Run:
    """`jax.tree.map` over the equations, float32 inside."""

    def zeros() -> Any:
        return {name: jnp.zeros(x.shape, jnp.float32) for name, x in model.items()}

    def over(function: Callable[..., Any], *trees: Any) -> tuple[Any, ...]:
        out = [
            function(*leaves) for leaves in zip(*map(dict.values, trees), strict=True)
        ]
        return tuple(
            dict(zip(trees[0], each, strict=True)) for each in zip(*out, strict=True)
        )

    def wide(grads: Any) -> Any:
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def sgdm(carry: Any, grads: Any) -> Any:
        def one(x: Any, v: Any, g: Any) -> Any:
            v = 0.9 * v + g
            return (x - LR * v).astype(x.dtype), v

        return over(one, *carry, wide(grads))

    def lion(carry: Any, grads: Any) -> Any:
        def one(x: Any, m: Any, g: Any) -> Any:
            u = jnp.sign(0.9 * m + 0.1 * g) + DECAY * x
            return (x - LR * u).astype(x.dtype), 0.99 * m + 0.01 * g

        return over(one, *carry, wide(grads))

    def adam(carry: Any, grads: Any) -> Any:
        count, xs, ms, vs = carry
        grads, t = wide(grads), count + 1
        decay = 0.0 if rule == "Adam" else DECAY
        share = 1.0
        if rule == "clip+AdamW":
            squares = sum(jnp.sum(g * g) for g in grads.values())
            share = jnp.minimum(1.0, CLIP / jnp.sqrt(squares))

        def one(x: Any, m: Any, v: Any, g: Any) -> Any:
            g = share * g
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
            u = m_hat / (jnp.sqrt(v_hat) + 1e-8)
            if decay:
                u = u + decay * x
            return (x - LR * u).astype(x.dtype), m, v

        return (t, *over(one, xs, ms, vs, grads))

    if rule == "SGDm":
        return Run((model, zeros()), donating(sgdm), lambda carry: carry[0])
    if rule == "Lion":
        return Run((model, zeros()), donating(lion), lambda carry: carry[0])
    carry = (jnp.zeros((), jnp.int32), model, zeros(), zeros())
    return Run(carry, donating(adam), lambda carry: carry[1])


def floor(rule: str, model: Arrays) -> Run | None:
    """The least that memory allows: a donated sum, by the bytes that the rule moves.

    Only for models that do not fit into a cache; and only for the time, its results are
    not the rule's.
    """
    numbers = sum(x.size for x in model.values())
    if numbers < 10_000_000:
        return None
    size = next(iter(model.values())).dtype.itemsize
    moved = (2 + GRADIENT_READS[rule]) * size + 4 * STATE_WORDS[rule]

    def step(carry: Any, grads: Any) -> Any:
        return {name: x + grads[name] for name, x in carry.items()}

    return Run(model, donating(step), lambda carry: None, moved / (3 * size))


def torch_(rule: str, model: Arrays, way: str) -> Run | None:
    import torch

    size = next(iter(model.values())).dtype
    if size != jnp.float32:  # its moments would be 16-bit, too
        return None
    params = [torch.nn.Parameter(torch.tensor(np.asarray(x))) for x in model.values()]
    options: Any = {"lr": LR, way: True}
    if rule == "SGDm":
        optimizer: Any = torch.optim.SGD(params, momentum=0.9, **options)
    elif rule == "Adam":
        optimizer = torch.optim.Adam(params, **options)
    elif rule == "Lion":
        return None
    else:
        optimizer = torch.optim.AdamW(params, weight_decay=DECAY, **options)
    held: dict[str, Any] = {}

    def step(carry: Any, grads: Any) -> Any:
        if not held:
            held.update({k: torch.tensor(np.asarray(g)) for k, g in grads.items()})
        for p, g in zip(params, held.values(), strict=True):
            p.grad = g
        if rule == "clip+AdamW":
            torch.nn.utils.clip_grad_norm_(params, CLIP)  # the same the second time
        optimizer.step()
        return carry

    def now(carry: Any) -> Any:
        return {k: p.detach().numpy() for k, p in zip(carry, params, strict=True)}

    return Run(dict.fromkeys(model), step, now)


Peer = Callable[[str, Arrays], Run | None]

PEERS: dict[str, Peer] = {
    "optimjax": optimjax,
    "optimjax, XLA": optimjax_xla,
    "optax": optax_,
    "by hand": by_hand,
    "floor": floor,
}
if importlib.util.find_spec("torch"):
    PEERS["torch fused"] = lambda rule, model: torch_(rule, model, "fused")
    PEERS["torch foreach"] = lambda rule, model: torch_(rule, model, "foreach")
