"""The compiled training step: gradients, rule and update in one dispatch."""

import dataclasses
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimjax.arrays import buffer, cast_like, is_traced, widen
from optimjax.examples import check_batch, per_example
from optimjax.frame import Frame, framed
from optimjax.hyper import NOT_NEGATIVE, ByPath, Hyper, canonical, check_range, evaluate
from optimjax.layout import Layout
from optimjax.paths import Path, Slots, complain
from optimjax.reading import scale_of
from optimjax.rule import Rule, is_rule
from optimjax.state import State, as_state
from optimjax.training import check_shapes, descend
from optimjax.treewide import squared_length

__all__ = ["Step", "make_step"]

Model = TypeVar("Model")


def make_step(
    loss: Callable[..., Any],
    *,
    has_aux: bool = False,
    donate: bool = False,
    sam: Hyper | None = None,
    sampled_loss: Callable[..., Any] | None = None,
    per_example: bool = False,
) -> "Step":
    """A compiled training step: `state, model, value = step(state, model, *batch)`.

    Takes the model apart by the ties in `state`, so each array crosses the `jit` once;
    differentiates with respect to the slots, where the sum over tied places is what
    `grad` does anyway; applies the rule; and puts the model together again, with one
    object in all tied places. Complex gradients are conjugated, so that the step goes
    downhill.

    Arrays that are not trained, and the batch, are arguments of the compiled function.
    Leaves that are not arrays (functions, strings, Python numbers) are constants of it:
    another value compiles again.

    Args:
        loss: function of `(model, *batch)` that returns a real scalar, or
            `(scalar, aux)` with `has_aux`.
        has_aux: the third result is `(value, aux)`, as with `jax.value_and_grad`.
        donate: reuse the memory of `state` and of the trained arrays of `model` for the
            new ones. Whoever holds the old ones cannot read them afterwards.
        sam: sharpness-aware minimisation (Foret et al. 2021, arXiv:2010.01412): the
            gradient is taken a second time, at `sam` (0.05, say, in the unit of the
            parameters; or a schedule) uphill of the model. Value and aux are those at
            the model.
        sampled_loss: function of `(model, key, *batch)` that returns the loss with
            labels drawn from what the model predicts, as a real scalar, for rules that
            need it: `Sophia(estimate=gauss_newton_bartlett(batch_size))`.
        per_example: take the gradient of each example apart, for `PrivateGradients`.
            `loss` is of ONE example: each array of the batch has a first axis that
            numbers them, and the loss gets one member. Value is the mean; aux is
            stacked. The gradients of all examples are in memory at once.
    Returns: a `Step`; `step.scan(state, model, *batches)` takes many steps at once.

    >>> import optimjax as oj
    >>> def loss(model, x):
    ...     return jnp.sum(model["act"](model["w"]) * x)
    >>> model = {"w": jnp.array([1.0, -1.0]), "act": jax.nn.relu}
    >>> state = oj.setup(oj.SGD(0.5), model)
    >>> step = oj.make_step(loss)
    >>> state, model, value = step(state, model, jnp.array([2.0, 2.0]))
    >>> model["w"], value
    (Array([ 0., -1.], dtype=float32), Array(2., dtype=float32))
    """
    if is_rule(loss) or not callable(loss):
        raise TypeError(
            f"make_step: loss is a {type(loss).__name__}, expected a function (model, "
            "*batch) -> scalar. The rule is in the state: setup(rule, model)."
        )
    if sam is not None:
        sam = canonical(sam, "make_step: sam")
        if isinstance(sam, ByPath):
            raise TypeError("make_step: sam differs by path, expected one radius.")
        check_range("make_step", "sam", sam, NOT_NEGATIVE)
    if per_example and sam is not None:
        raise TypeError(
            "make_step: sam and per_example, expected one: sam moves the model along "
            "the gradient of the whole batch."
        )
    return Step(loss, has_aux, donate, sam, sampled_loss, per_example)


@dataclasses.dataclass(frozen=True)
class Step(Generic[Model]):
    """What `make_step` makes."""

    loss: Callable[..., Any]
    has_aux: bool = False
    donate: bool = False
    sam: Any = None
    sampled_loss: Callable[..., Any] | None = None
    per_example: bool = False

    def __call__(
        self, state: State, model: Model, *batch: Any
    ) -> tuple[State, Model, Any]:
        """One step.

        Args:
            state: from `setup`, or from the step before.
            model: the model, with the structure that `setup` saw.
            *batch: what `loss` takes besides, any pytrees.
        Returns: the new state, the new model, and the loss before the step.
        Raises: ValueError if `model` is not the one of `setup`, or was donated.
        """
        return self._run(self._one, state, model, batch)

    def scan(
        self, state: State, model: Model, *batches: Any, length: int | None = None
    ) -> tuple[State, Model, Any]:
        """A step for each batch, in one dispatch.

        Args:
            *batches: as for one step, with a leading axis: (steps, ...).
            length: the number of steps, where there are no batches.
        Returns: the new state, the new model, and the losses, (steps,).
        """
        leaves = jax.tree.leaves(batches)
        if not leaves and length is None:
            raise TypeError("scan: no batches, expected some, or length=.")
        if not all(np.ndim(x) for x in leaves):
            raise TypeError(
                "scan: a batch without an axis of steps. Stack the batches: each array "
                "is (steps, ...), as jnp.stack makes it."
            )
        return self._run(self._many, state, model, batches, length=length)

    def _run(
        self, compiled: Any, state: State, model: Any, batch: Any, **static: Any
    ) -> Any:
        if not isinstance(state, State):
            as_state(state, "step")
        self._check_rule(state.rule)
        ties = state.ties.confirmed("step", model)
        if ties is not state.ties:
            state = dataclasses.replace(state, ties=ties)
        layout, leaves = ties.take_apart("step", model)
        frame = framed(ties, layout, leaves, state.frozen)
        params, others, rest = frame.take(leaves)
        if self.donate:
            params = self._givable(params, (*others, *rest))
        whole = not any(map(is_traced, (*params, *others)[:1]))
        try:
            # The rule's numbers stay what they are: neither donated nor given back.
            inner, params, out = compiled(
                state.inner,
                params,
                state.rule,
                others,
                rest,
                batch,
                frame=frame,
                whole=whole,
                **static,
            )
        except Exception as error:
            if "donated" in str(error) or "deleted" in str(error):
                _explain_deleted(layout, leaves, state, batch, error)
            raise
        if self.donate and whole:
            arrays = _arrays(params, (*others, *rest))
            self._known["arrays"] = list(map(weakref.ref, arrays))
        state = State(state.rule, inner, ties, state.frozen)
        return state, frame.rebuild(params, leaves), out

    def _check_rule(self, rule: Rule) -> None:
        """ValueError if the rule is for other gradients than are taken."""
        if self.per_example and not per_example(rule):
            raise ValueError(
                f"step: per_example, but {rule!r} takes the gradient of a whole batch, "
                "expected PrivateGradients, or a Chain that begins with it."
            )
        if not self.per_example and per_example(rule):
            raise ValueError(
                "step: PrivateGradients takes the gradient of each example. Use "
                "make_step(loss, per_example=True), with a loss of one example."
            )

    def _givable(
        self, params: tuple[Any, ...], kept: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """`params`, with a copy of each that cannot be donated.

        A NumPy array's memory is the user's, and what was one array but is trained
        apart, or trained beside a frozen one, is one buffer. Of what the last step
        returned every array has a buffer of its own, so addresses are not looked at.
        """
        arrays = _arrays(params, kept)
        known = self._known.get("arrays", ())
        if len(known) == len(arrays) and all(map(_same, known, arrays)):
            return params
        seen = {*map(buffer, kept)}
        own = []
        for x in params:
            if isinstance(x, np.ndarray) or (
                buffer(x) is not None and buffer(x) in seen
            ):
                x = jnp.array(x, copy=True)
            seen.add(buffer(x))
            own.append(x)
        return tuple(own)

    @cached_property
    def _known(self) -> dict[str, list[Any]]:
        """Weak references to what the last step returned, and to what it kept."""
        return {}

    @cached_property
    def _one(self) -> Any:
        return jax.jit(
            self._step,
            static_argnames=("frame", "whole"),
            donate_argnums=self._donated,
        )

    @cached_property
    def _many(self) -> Any:
        def steps(
            inner: Any,
            params: Any,
            rule: Rule,
            others: Any,
            rest: Any,
            batches: Any,
            *,
            frame: Frame,
            whole: bool,
            length: int | None,
        ) -> Any:
            def body(carry: Any, batch: Any) -> Any:
                inner, params = carry
                inner, params, out = self._step(
                    inner,
                    params,
                    rule,
                    others,
                    rest,
                    batch,
                    frame=frame,
                    whole=whole,
                )
                return (inner, params), out

            carry, outs = jax.lax.scan(body, (inner, params), batches, length)
            return *carry, outs

        return jax.jit(
            steps,
            static_argnames=("frame", "whole", "length"),
            donate_argnums=self._donated,
        )

    @property
    def _donated(self) -> tuple[int, ...]:
        return (0, 1) if self.donate else ()

    def _step(
        self,
        inner: Any,
        params: tuple[Array, ...],
        rule: Rule,
        others: tuple[Array, ...],
        rest: tuple[Any, ...],
        batch: tuple[Any, ...],
        *,
        frame: Frame,
        whole: bool,
    ) -> tuple[Any, tuple[Array, ...], Any]:
        state = State(rule, inner, frame.ties, frame.still)

        if self.per_example:
            check_batch(batch)

        def objective(params: tuple[Array, ...], batch: tuple[Any, ...]) -> Any:
            model = frame.build(params, others, rest)
            out = self.loss(model, *batch)
            if self.has_aux != isinstance(out, tuple):
                expected = "(scalar, aux)" if self.has_aux else "a scalar"
                found = "a tuple" if isinstance(out, tuple) else "no tuple"
                raise TypeError(
                    f"make_step: the loss returned {found}, expected {expected} with "
                    f"has_aux={self.has_aux}."
                )
            return out if self.has_aux else (out, None)

        names = frame.names
        held = frame.slots(params, others)
        slots = Slots((name, held[name]) for name in names)
        check_shapes("step", state.ties, slots.values(), whole=whole)
        scale = scale_of(state)

        def over_examples(function: Callable[..., Any]) -> Callable[..., Any]:
            return jax.vmap(function, (None, 0)) if self.per_example else function

        def mean(value: Array) -> Array:
            return jnp.mean(value) if self.per_example else value

        def scaled(params: tuple[Array, ...], batch: tuple[Any, ...]) -> Any:
            value, aux = objective(params, batch)
            return value if scale is None else widen(value) * scale, (value, aux)

        def descent(params: tuple[Array, ...]) -> Any:
            gradient = over_examples(jax.value_and_grad(scaled, has_aux=True))
            (_, (value, aux)), grads = gradient(params, batch)
            grads = tuple(g.conj() if jnp.iscomplexobj(g) else g for g in grads)
            return (mean(value), aux), grads

        (value, aux), grads = descent(params)
        if self.sam is not None:
            radius = evaluate(self.sam, state.count if callable(self.sam) else 0)
            _, grads = descent(_uphill(params, grads, radius))
        summed = Slots((name, None) for name in names)
        for i, g in zip(frame.trained, grads, strict=True):
            summed[names[i]] = g

        def moved(slots: dict[Path, Array]) -> tuple[Array, ...]:
            # A rule for a part of the model moves that part alone.
            every = {**held, **slots}
            return tuple(every[names[i]] for i in frame.trained)

        def value_fn(slots: dict[Path, Array]) -> Array:
            return mean(over_examples(objective)(moved(slots), batch)[0])

        context: dict[str, Any] = {"value": value, "value_fn": value_fn}
        sampled = self.sampled_loss
        if sampled is not None:

            def sampled_value_fn(slots: dict[Path, Array], key: Array) -> Array:
                return sampled(frame.build(moved(slots), others, rest), key, *batch)

            context["sampled_value_fn"] = sampled_value_fn
        state, slots = descend(state, slots, summed, **context)
        new = tuple(slots[names[i]] for i in frame.trained)
        return state.inner, new, (value, aux) if self.has_aux else value


def _arrays(params: tuple[Any, ...], kept: tuple[Any, ...]) -> list[Any]:
    """`params`, and of what is kept those whose buffers can be shared with them."""
    return [*params, *(x for x in kept if isinstance(x, jax.Array))]


def _same(reference: Any, x: Any) -> bool:
    return reference() is x


def _uphill(
    params: tuple[Array, ...], grads: tuple[Array, ...], radius: Any
) -> tuple[Array, ...]:
    """`params`, moved by `radius` along the gradient; not at all where that is 0."""
    wide = [widen(g) for g in grads]
    norm = jnp.sqrt(squared_length(wide))
    radius = jnp.asarray(radius, norm.dtype)
    share = jnp.where(norm > 0, radius / jnp.where(norm > 0, norm, 1), 0)
    return tuple(
        cast_like(widen(x) + share.astype(g.real.dtype) * g, x)
        for x, g in zip(params, wide, strict=True)
    )


def _explain_deleted(
    layout: Layout, leaves: list[Any], state: State, batch: Any, error: Exception
) -> None:
    def deleted(x: Any) -> bool:
        return isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted()

    problems = {
        path: "its array was donated to an earlier step"
        for path, leaf in zip(layout.paths, leaves, strict=True)
        if deleted(leaf)
    }
    if any(map(deleted, jax.tree.leaves(state))):
        problems["state"] = "it was donated to an earlier step"
    if problems:
        raise ValueError(
            complain("step", problems)
            + " Use the state and the model that the step returned, or "
            "make_step(..., donate=False)."
        ) from error
    given = {buffer(x) for x in (*leaves, *jax.tree.leaves(state))} - {None}
    if any(buffer(x) in given for x in jax.tree.leaves(batch)):
        raise ValueError(
            "step: an array of the batch is one of the model or the state, which are "
            "donated. Give a copy of it: jnp.copy(x)."
        ) from error
