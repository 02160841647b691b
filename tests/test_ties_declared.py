"""Ties that identity cannot show: declared by path, kept in the state, described."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, Pair, close, numpy_adam, same_bits

import optimjax as oj


def weights(shape=(2, 3), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_declared_transpose_brings_its_gradient_home():
    """A decoder that is the encoder's transpose trains one array, not two."""
    w = weights()
    model = Pair(w, w.T)
    assert len(oj.setup(oj.Adam(), model).slots) == 2, "a transpose is no tie"
    ties = {"decoder": ("encoder", jnp.transpose)}
    state = oj.setup(oj.Adam(0.1), model, ties=ties)
    assert list(state.slots) == ["encoder"]
    assert "decoder" in str(state.ties) and "encoder" in str(state.ties)
    g, h = weights((2, 3), 1), weights((3, 2), 2)
    cases = [(Pair(g, h), g + h.T), (Pair(None, h), h.T), (Pair(g, None), g)]
    x, totals = w, []
    for grads, total in cases:
        state, model = oj.update(state, model, grads)
        totals.append(total)
        x = numpy_adam(w, totals, 0.1)
        close(model.encoder, x)
        close(model.decoder, x.T)


def test_declared_transform_is_any_function_whose_vjp_is_applied():
    """A transform that is not its own transpose: the chain rule, not a reshape."""
    w = weights((4,))
    double = lambda x: jnp.tanh(2 * x[:3])  # noqa: E731
    model = Pair(w, double(w))
    state = oj.setup(oj.SGD(0.5), model, ties={"decoder": ("encoder", double)})
    h = weights((3,), 1)
    pulled = jax.vjp(double, w)[1](h)[0]
    state, model = oj.update(state, model, Pair(None, h))
    close(model.encoder, w - 0.5 * pulled)
    close(model.decoder, double(model.encoder))


def test_transposed_tie_in_a_compiled_step_equals_reading_the_transpose():
    """The declared way must train as the forward pass that reads `encoder.T`."""
    w, x = weights(), weights((3,), 5)

    def loss(m):
        return jnp.sum((m.decoder @ jnp.tanh(m.encoder @ x) - x) ** 2)

    model = Pair(w, w.T)
    ties = {"decoder": ("encoder", jnp.transpose)}
    state = oj.setup(oj.Adam(0.05), model, ties=ties)
    step = oj.make_step(loss)
    alone = {"w": w}
    other = oj.setup(oj.Adam(0.05), alone)
    plain = oj.make_step(lambda m: loss(Pair(m["w"], m["w"].T)))
    for _ in range(3):
        state, model, value = step(state, model)
        other, alone, expected = plain(other, alone)
        close(value, expected)
        close(model.encoder, alone["w"])
        assert np.array_equal(model.decoder, model.encoder.T)


def test_tie_in_the_state_outlives_a_model_that_lost_it():
    """A model that went through `jit`, or a file, is trained tied as before."""
    w, g = weights(), weights(seed=1)
    model = {"a": w, "b": w}
    state = oj.setup(oj.SGD(0.1), model)
    lost = jax.jit(lambda m: m)(model)
    assert lost["a"] is not lost["b"]
    _, new = oj.update(state, lost, {"a": g, "b": g})
    assert new["a"] is new["b"]
    close(new["a"], w - 0.2 * g)


def test_declared_tie_of_a_loaded_model_and_of_a_chain_of_places():
    """Loaded checkpoints hold copies; a declared tie may name another tied place."""
    w = weights()
    model = {"a": w, "b": w + 0, "c": w + 0, "d": w}
    for ties in ({"b": "a", "c": "a"}, {"b": "a", "c": "b"}, {"b": "d", "c": "d"}):
        state = oj.setup(oj.SGD(0.5), model, ties=ties)
        assert len(state.slots) == 1
        g = weights(seed=1)
        _, new = oj.update(state, model, {"a": g, "b": g, "c": g, "d": None})
        close(new["a"], w - 1.5 * g)
        assert new["a"] is new["b"] is new["c"] is new["d"]


def test_setup_inside_jit_with_declared_ties():
    """Identity is invisible to a trace; a declared tie is not."""

    @jax.jit
    def run(model, grads):
        state = oj.setup(oj.SGD(0.1), model, ties={"b": "a"})
        assert list(state.slots) == ["a"]
        return oj.update(state, model, grads)

    w, g = weights(), weights(seed=1)
    _, new = run({"a": w, "b": w}, {"a": g, "b": g})
    close(new["a"], w - 0.2 * g)


@pytest.mark.parametrize("trace", [jax.jit, lambda f: lambda m: jax.eval_shape(f, m)])
def test_tie_that_a_traced_setup_could_not_see_is_an_error_later(trace):
    """`jit(setup)` would otherwise train a tied model untied, without a word."""
    w = weights()
    model = {"a": w, "b": w}
    state = trace(lambda m: oj.setup(oj.Adam(), m))(model)
    step = oj.make_step(lambda m: jnp.sum(m["a"] * m["b"]))
    with pytest.raises(ValueError, match=r"'b'.*'a'.*ties="):
        step(state, model)


def test_traced_setup_of_an_untied_model_is_no_error():
    """The check for ties that were not seen must not stop those without any."""
    model = {"a": weights(), "b": weights(seed=1)}
    state = jax.jit(lambda m: oj.setup(oj.SGD(0.5), m))(model)
    step = oj.make_step(lambda m: jnp.sum(m["a"] * m["b"]))
    state, new, _ = step(state, model)
    close(new["a"], model["a"] - 0.5 * model["b"])


def test_ties_are_hashable_comparable_and_readable():
    """Ties are compared on every `jit` call, and read by people."""
    w = weights()

    def model():
        return {"z": Pair({"weight": w}, {"weight": w}), "n": weights(seed=1)}

    one, two = oj.find_ties(model()), oj.find_ties(model())
    assert one == two and hash(one) == hash(two)
    assert str(one) == "z/decoder/weight is z/encoder/weight"
    other = oj.find_ties(model(), ties=None)
    assert one != other


def test_ties_with_a_transform_do_not_compile_again():
    """Two set-ups of one transposed tie must share a compiled step."""
    w = weights()
    update = Counter(oj.update)
    run = jax.jit(update)
    model = Pair(w, w.T)
    ties = {"decoder": ("encoder", jnp.transpose)}
    states = [oj.setup(oj.SGD(0.1), model, ties=dict(ties)) for _ in range(2)]
    assert states[0].ties == states[1].ties
    assert hash(states[0].ties) == hash(states[1].ties)
    same_bits(*[run(state, model, model)[1] for state in states])
    assert update.traces == 1


def test_eager_update_after_a_traced_setup_meets_the_tie_too():
    """The first call that sees the arrays tells, whichever call it is."""
    w = weights()
    model = {"a": w, "b": w}
    state = jax.jit(lambda m: oj.setup(oj.Adam(), m))(model)
    with pytest.raises(ValueError, match=r"'b'.*'a'.*ties="):
        oj.update(state, model, model)


def test_tie_that_is_made_inside_a_trace_is_seen():
    """One traced array in two places is one object, and so one slot."""

    @jax.jit
    def run(w, g):
        model = {"a": w, "b": w}
        state = oj.setup(oj.SGD(0.1), model)
        assert list(state.slots) == ["a"]
        return oj.update(state, model, {"a": g, "b": g})[1]["b"]

    w, g = weights(), weights(seed=1)
    close(run(w, g), w - 0.2 * g)


@pytest.mark.parametrize("rate", [{"encoder": 0.5}, {"decoder": 0.5}])
def test_value_by_path_of_one_place_serves_the_tied_array(rate):
    """One array has one rate: naming one of its places is enough, as in `freeze`."""
    w = weights()
    state = oj.setup(oj.SGD(rate), Pair(w, w))
    _, new = oj.update(state, Pair(w, w), Pair(w, None))
    close(new.encoder, 0.5 * w)


def test_declared_tie_and_a_model_that_drifted_apart():
    """The slot's own place is the truth: the other place takes its value."""
    w = weights()
    for transform, other in ((None, w + 1), (jnp.transpose, w.T + 1)):
        tie = "encoder" if transform is None else ("encoder", transform)
        model = Pair(w, other)
        with pytest.warns(UserWarning, match="'decoder' is declared to be .*encoder"):
            state = oj.setup(oj.SGD(0.5), model, ties={"decoder": tie})
        _, new = oj.update(state, model, Pair(w, None))
        close(new.encoder, 0.5 * w)
        close(new.decoder, 0.5 * (w if transform is None else w.T))
