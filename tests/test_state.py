"""The live state: frozen parts, values by path, what it shows and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, Layer, Pair, buffers, close, numpy_adam, same_bits

import optimjax as oj


def model_of_three():
    return {
        "head": jnp.array([1.0, -2.0]),
        "layers": [
            Layer(jnp.array([[0.5, -0.25, 3.0]]), jnp.array([0.125, 2.0, -4.0])),
            Layer(jnp.array([[1.5], [-0.75]]), jnp.array([0.3])),
        ],
    }


def gradients(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), model_of_three()
    )


WHERE = [
    "layers/0/*",
    lambda path, leaf: path.startswith("layers/0"),
    ["layers/0/weight", "layers/0/bias"],
]


@pytest.mark.parametrize("where", WHERE, ids=["glob", "function", "globs"])
@pytest.mark.parametrize(
    "rule",
    [
        oj.SGD(0.1, momentum=0.9, weight_decay=0.1),
        oj.AdamW(0.1, weight_decay=0.3),
        oj.Chain(oj.WeightDecay(0.5), oj.Adam(0.1)),
        oj.Chain(oj.Adam(0.1), oj.WeightDecay(0.5)),
    ],
    ids=["sgd", "adamw", "decay first", "decay last"],
)
def test_frozen_part_is_bit_identical_and_thaws_where_it_stopped(rule, where):
    """Frozen weights must not climb by raw gradients, decay, coast or lose moments.

    The frozen part ends as if the updates in between had not been, its bias
    correction included; the rest ends as if nothing had been frozen.
    """
    model, state = model_of_three(), oj.setup(rule, model_of_three())
    free, whole = oj.setup(rule, model), model
    short, brief = free, model
    for t in range(6):
        if t == 2:
            state = oj.freeze(state, where)
        if t == 5:
            state = oj.thaw(state, where)
        before = model
        state, model = oj.update(state, model, gradients(t))
        free, whole = oj.update(free, whole, gradients(t))
        if 2 <= t < 5:
            same_bits(model["layers"][0], before["layers"][0])
        else:
            short, brief = oj.update(short, brief, gradients(t))
    same_bits(model["layers"][0], brief["layers"][0])
    same_bits(model["layers"][1], whole["layers"][1])
    same_bits(model["head"], whole["head"])


def test_freezing_in_the_middle_of_compiled_training():
    """Freezing works at run time, without another rule, state or model."""
    model = model_of_three()

    def loss(m):
        return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(m))

    step = oj.make_step(loss)
    state = oj.setup(oj.Adam(0.05), model)
    state, model, _ = step(state, model)
    state = oj.freeze(state, "head")
    before, moments = model["head"], state.slots["head"]
    for _ in range(2):
        state, model, _ = step(state, model)
        same_bits(model["head"], before)
        same_bits(state.slots["head"], moments)
    state = oj.thaw(state)
    x = np.asarray(model_of_three()["head"], np.float64)
    first = 2 * (x - 1)
    x1 = numpy_adam(x, [first], 0.05)
    state, model, _ = step(state, model)
    close(model["head"], numpy_adam(x, [first, 2 * (x1 - 1)], 0.05), rtol=1e-4)


def test_frozen_slot_does_not_shape_the_global_norm():
    """A frozen gradient of 99 would shrink a trained one of 1 to a hundredth."""
    model = {"train": jnp.array([1.0]), "frozen": jnp.array([1.0])}
    grads = {"train": jnp.array([1.0]), "frozen": jnp.array([99.0])}
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(1.0))
    frozen = oj.freeze(oj.setup(rule, model), "frozen")
    _, new = oj.update(frozen, model, grads)
    close(new["train"], np.array([0.0]))
    same_bits(new["frozen"], model["frozen"])
    apart = oj.setup(rule, model, trainable="train")
    _, new = oj.update(apart, model, grads | {"frozen": None})
    close(new["train"], np.array([0.0]))
    same_bits(new["frozen"], model["frozen"])


def test_tied_array_counts_once_in_the_global_norm_with_its_sum():
    """A norm over leaves would count a shared embedding twice."""
    w = jnp.array([1.0, 1.0])
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(1.0))
    state = oj.setup(rule, Pair(w, w))
    grads = Pair(jnp.array([3.0, -1.0]), jnp.array([0.0, 5.0]))
    _, new = oj.update(state, Pair(w, w), grads)
    close(new.encoder, np.array([1 - 0.6, 1 - 0.8]))


def test_weights_that_are_not_trained_cost_no_memory():
    """State is for what is trained: moments of frozen layers are wasted memory."""
    model = {"body": jnp.ones(1000), "head": jnp.ones(4)}
    for trainable in ("head", ["he*"], lambda path, leaf: leaf.size < 10):
        state = oj.setup(oj.Adam(), model, trainable=trainable)
        assert sum(x.size for x in jax.tree.leaves(state.inner)) == 9
        assert sum(x.size for x in jax.tree.leaves(state)) < 20
        _, new = oj.update(state, model, {"body": None, "head": jnp.ones(4)})
        assert new["body"] is model["body"]


def test_freezing_one_place_freezes_the_tied_array():
    """An array cannot stand still in one place and move in another."""
    w = jnp.array([1.0, 2.0])
    model = {"a": w, "b": w, "c": w + 1}
    state = oj.setup(oj.SGD(0.1), model)
    for where in ("a", "b"):
        frozen = oj.freeze(state, where)
        assert frozen.frozen == ("a",)
        _, new = oj.update(frozen, model, model)
        same_bits(new["a"], w)
        same_bits(new["b"], w)
        assert not np.array_equal(new["c"], model["c"])
        assert oj.thaw(frozen, where).frozen == ()


def test_freeze_and_thaw_by_parts():
    """Gradual unfreezing: each call adds or takes away its own slots only."""
    state = oj.setup(oj.SGD(0.1), model_of_three())
    state = oj.freeze(oj.freeze(state, "layers/*"), ["head", "layers/0/*"])
    assert len(state.frozen) == 5
    state = oj.thaw(state, "layers/1/*")
    assert state.frozen == ("head", "layers/0/bias", "layers/0/weight")
    assert oj.thaw(state).frozen == ()


def test_path_with_glob_characters_names_itself():
    """A key like `w[0]` must be addressable by the path that is printed for it."""
    model = {"w[0]": jnp.ones(2), "w0": jnp.ones(2)}
    state = oj.freeze(oj.setup(oj.SGD(0.1), model), "w[0]")
    assert state.frozen == ("w[0]",)


def test_adjust_one_group_leaves_the_rest_alone():
    """Changing one layer's rate must not touch other layers or any moment."""
    model = {"enc": jnp.array(1.0), "head": jnp.array(1.0)}
    model = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model)
    ones = jax.tree.map(jnp.ones_like, model)
    state = oj.setup(oj.SGD({"enc": 0.1, "head": 0.01}, momentum=0.9), model)
    state, model = oj.update(state, model, ones)
    close(model, {"enc": np.array(0.9), "head": np.array(0.99)})
    inner = state.inner
    state = oj.adjust(state, where="head", learning_rate=0.02)
    same_bits(state.inner, inner)
    assert all(
        x is y
        for x, y in zip(
            jax.tree.leaves(state.inner), jax.tree.leaves(inner), strict=True
        )
    )
    state, model = oj.update(state, model, ones)
    close(model, {"enc": np.array(0.9 - 0.19), "head": np.array(0.99 - 0.02 * 1.9)})


def test_adjust_is_pure_and_reaches_nested_rules():
    """The old state must keep its rate; a rate inside a chain must be found."""
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    grads = jax.tree.map(jnp.ones_like, model)
    rule = oj.Chain(
        oj.ClipByGlobalNorm(100.0),
        oj.Partition({"x": oj.SGD(0.5), "y": oj.SGD(0.25)}, {"a": "x", "*": "y"}),
    )
    state = oj.setup(rule, model)
    for where, expected in [
        (None, (0.875, 0.875)),
        ("a", (0.875, 0.75)),
        (lambda path, leaf: path == "b", (0.5, 0.875)),
    ]:
        changed = oj.adjust(state, where=where, learning_rate=0.125)
        _, new = oj.update(changed, model, grads)
        close([new["a"][0], new["b"][0]], [np.array(x) for x in expected])
    _, new = oj.update(state, model, grads)
    close([new["a"][0], new["b"][0]], [np.array(0.5), np.array(0.75)])
    clipped = oj.adjust(state, max_norm=np.sqrt(2) / 4)
    _, new = oj.update(clipped, model, grads)
    close([new["a"][0], new["b"][0]], [np.array(1 - 0.125), np.array(1 - 0.0625)])


def test_adjust_takes_schedules_and_values_by_path():
    """Whatever may be given when the rule is built may be given later."""
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    state = oj.setup(oj.SGD(0.5), model)
    grads = jax.tree.map(jnp.ones_like, model)
    by_path = oj.adjust(state, learning_rate={"a": 0.25, "*": 0.125})
    close(
        oj.update(by_path, model, grads)[1],
        {"a": np.full(1, 0.75), "b": np.full(1, 0.875)},
    )
    later = oj.adjust(
        state, learning_rate=lambda count: jnp.where(count < 1, 0.25, 0.5)
    )
    later, new = oj.update(later, model, grads)
    close(new["a"], np.full(1, 0.75))
    close(oj.update(later, new, grads)[1]["b"], np.full(1, 0.25))
    number = oj.adjust(later, learning_rate=0.125)
    close(oj.update(number, new, grads)[1]["b"], np.full(1, 0.625))


def test_hyperparams_are_those_of_the_step_just_taken():
    """'What is my learning rate now?' has one answer, by path, under a schedule."""
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    schedule = lambda count: 0.5 ** count.astype(jnp.float32)  # noqa: E731
    groups = {"x": oj.Adam(schedule, b1=0.7), "y": oj.SGD({"b": 0.25})}
    rule = oj.Chain(
        oj.ClipByGlobalNorm(9.0), oj.Partition(groups, {"a": "x", "*": "y"})
    )
    state = oj.setup(rule, model)
    for taken in (1, 1, 0.5, 0.25):
        now = oj.hyperparams(state)
        assert list(now) == ["a", "b"]
        close(now["a"]["learning_rate"], np.array(taken))
        close(now["a"]["b1"], np.array(0.7))
        close(now["b"]["learning_rate"], np.array(0.25))
        assert "b1" not in now["b"]
        close(now["b"]["max_norm"], np.array(9.0))
        state, model = oj.update(state, model, model)


def test_state_prints_as_a_tree_like_the_model():
    """Someone looks at the state in a terminal, and finds each slot with its rule."""
    w = jnp.ones((2, 3))
    model = {"block": {"weight": w, "bias": jnp.ones(3)}, "decoder": w}
    state = oj.setup(oj.Chain(oj.ClipByGlobalNorm(1.0), oj.Adam(0.25)), model)
    text = repr(state)
    for word in ("block", "weight", "bias", "decoder", "Adam", "0.25", "m f32[2,3]"):
        assert word in text, text
    order = [text.index(word) for word in ("block", "bias", "weight", "= decoder")]
    assert order == sorted(order)
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert "Traced" not in text and "0x" not in text
    jax.jit(lambda s: (repr(s), s)[1])(state)
    repr(jax.eval_shape(lambda: oj.setup(oj.Adam(), model)))


def test_summary_lists_slots_bytes_ties_and_frozen():
    """One table answers: what is trained, by what, at what cost, what is shared."""
    w = jnp.ones((2, 3), jnp.bfloat16)
    model = {"a": w, "b": w, "c": jnp.ones(5), "skip": jnp.ones(1000)}
    state = oj.setup(oj.Adam(), model, trainable=["a", "b", "c"])
    state = oj.freeze(state, "c")
    table = oj.summary(state).splitlines()
    rows = {line.split()[0]: line for line in table[1:-1]}
    assert "bfloat16" in rows["a"] and "(2, 3)" in rows["a"] and "= b" in rows["a"]
    assert "48 B" in rows["a"]
    assert "frozen" in rows["c"] and "40 B" in rows["c"] and "Adam" in rows["c"]
    assert "b" not in rows
    held = sum(x.nbytes for x in jax.tree.leaves(state.inner))
    assert f"{held} B" in table[-1]
    assert "2 slots" in table[-1] and "3 places" in table[-1]


def test_summary_says_what_a_slot_has_of_its_own():
    model = {"qkv": jnp.ones((4, 12)), "w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    adamw = oj.AdamW(decay_where=oj.matrices)
    state = oj.setup(oj.Muon(axes={"qkv": oj.Axes(split=(-1, 3))}, aux=adamw), model)
    notes = {line.split()[0]: line for line in oj.summary(state).splitlines()}
    assert notes["b"].endswith("decay_where=False")
    assert notes["qkv"].endswith("axes=Axes(split=(-1, 3))")
    assert notes["w"].endswith(" B")


def test_a_rule_with_choices_for_many_slots_is_read_at_a_glance():
    model = {f"w{i}": jnp.ones((2, 2) if i % 3 else 2) for i in range(9)}
    rule = oj.AdamW({"w1": 0.1, "*": 0.01}, decay_where=oj.matrices)
    shown = repr(oj.setup(rule, model).rule)
    assert "learning_rate={0.01: 8 paths, 0.1: 1 path}" in shown
    assert "decay_where={False: 3 paths, True: 6 paths}" in shown


def test_state_is_a_tree_with_readable_key_paths():
    """A checkpoint, an error of `jit` or a filter names what a leaf is."""
    state = oj.setup(oj.Adam(0.1), {"layers": [{"weight": jnp.ones(2)}]})
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    moment = [p for p in paths if p.endswith("layers/0/weight/m")]
    assert len(moment) == 1 and moment[0].startswith("inner/")
    assert any(p.endswith("learning_rate") for p in paths)
    assert any(p.endswith("count") for p in paths)
    assert state.slots["layers/0/weight"].v.shape == (2,)


def test_no_buffer_is_held_twice():
    """A buffer in two leaves of state and parameters cannot be donated."""
    w = jnp.zeros((2, 3))
    model = {"a": w, "b": w, "c": jnp.zeros(3), "d": jnp.zeros(3), "e": jnp.zeros(())}
    half = jnp.asarray(0.5)
    for rule in (
        oj.Adam(half, b1=half, b2=half, eps=half),
        oj.Chain(oj.SGD(half, momentum=half), oj.WeightDecay(half), oj.Adam(half)),
        oj.SGD({"a": half, "b": half, "*": half}),
    ):
        state = oj.setup(rule, model)
        state = oj.adjust(state, learning_rate=half)
        state = oj.align(state, {**model, "a": None, "b": None, "d": None})
        held = buffers([state, half, model["a"], model["c"], model["d"], model["e"]])
        assert len(set(held)) == len(held)


def test_align_prepares_a_scan_for_skipped_slots():
    """A slot's first skip must not change the carry in the middle of a scan."""
    model = {"a": jnp.ones(2), "b": {"c": jnp.ones(3)}}
    grads = {"a": jnp.ones(2), "b": None}
    state = oj.setup(oj.Adam(0.1), model)
    state, model = oj.update(state, model, jax.tree.map(jnp.ones_like, model))
    aligned = oj.align(state, grads)
    (after, new), _ = jax.lax.scan(
        lambda carry, _: (oj.update(*carry, grads), None),
        (aligned, model),
        length=3,
    )
    assert jax.tree.structure(after) == jax.tree.structure(aligned)
    same_bits(new["b"], model["b"])
    loop = (state, model)
    for _ in range(3):
        loop = oj.update(*loop, grads)
    close(new["a"], loop[1]["a"])
    full = jax.tree.map(jnp.ones_like, model)
    close(oj.update(after, new, full)[1], oj.update(loop[0], loop[1], full)[1])


def test_freezing_compiles_once_per_set_of_frozen_slots():
    """Alternating between two sets must hit the cache of each."""
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    loss = Counter(lambda m: jnp.sum(m["a"] * m["b"]))
    step = oj.make_step(loss)
    state = oj.setup(oj.Adam(0.1), model)
    for t in range(8):
        state = oj.freeze(oj.thaw(state), "a" if t % 2 else "b")
        state, model, _ = step(state, model)
        if t == 3:
            settled = loss.traces
    assert loss.traces == settled <= 4
