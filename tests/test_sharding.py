"""Several devices: the state lies where its parameters lie, and stays there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, Pair, buffers, close, compilations, same_bits, signatures
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optimjax as oj
from optimjax.arrays import total

RULES = {
    "adam": oj.Adam(0.1),
    "momentum": oj.SGD(lambda count: 0.1, momentum=0.9, weight_decay=0.1),
    "chain": oj.Chain(oj.ClipByGlobalNorm(1.0), oj.AdamW(0.1, weight_decay=0.1)),
    "groups": oj.Partition({"x": oj.Adam(0.1), "y": oj.SGD(0.1)}, {"w": "x", "*": "y"}),
}
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(axes, shape=(4,), names=("x",)):
    return jax.make_mesh(shape, names, axis_types=(AXES[axes],) * len(names))


def plain_model(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (8, 4), "b": (4,), "s": ()}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def sharded_model(mesh, seed=0):
    specs = {"w": P("x"), "b": P(), "s": P()}
    return {
        k: jax.device_put(v, NamedSharding(mesh, specs[k]))
        for k, v in plain_model(seed).items()
    }


def loss(m):
    return jnp.mean((m["w"] - 0.3) ** 2) + jnp.sum(m["b"] ** 2) + m["s"] ** 2


def lies_like(state, model):
    """Every moment lies as its parameter does, everything else on all its devices."""
    devices = model["w"].sharding.device_set
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        assert x.sharding.device_set == devices, jax.tree_util.keystr(path)
        for name, p in model.items():
            if f"'{name}'" in jax.tree_util.keystr(path) and x.shape == p.shape:
                where = jax.tree_util.keystr(path)
                assert x.sharding.is_equivalent_to(p.sharding, x.ndim), where


def lies_at(model, shardings):
    """The parameters lie where they lay: the optimiser moves none of them."""
    for name, x in model.items():
        assert x.sharding.is_equivalent_to(shardings[name], x.ndim), name


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("name", RULES)
def test_sharded_run_compiles_once_and_keeps_every_sharding(name, axes):
    """A count left on one device costs a second compilation, whole moments memory."""
    mesh = mesh_of(axes)
    model = sharded_model(mesh)
    state = oj.setup(RULES[name], model)
    lies_like(state, model)
    update = Counter(oj.update)
    run = jax.jit(update)
    shardings = jax.tree.map(lambda x: x.sharding, model)
    plain = plain_model()
    other = oj.setup(RULES[name], plain)
    for t in range(3):
        grads = sharded_model(mesh, t + 1)
        with compilations() as compiled:
            state, model = jax.block_until_ready(run(state, model, grads))
        assert not (t and compiled), "a later step compiled again"
        lies_like(state, model)
        lies_at(model, shardings)
        other, plain = oj.update(other, plain, plain_model(t + 1))
        close(model, plain)
    assert update.traces == 1


@pytest.mark.parametrize("donate", [False, True], ids=["keep", "donate"])
@pytest.mark.parametrize("axes", AXES)
def test_compiled_step_on_a_mesh(axes, donate):
    """`make_step` and its scan on sharded parameters equal the run on one device."""
    model = sharded_model(mesh_of(axes))
    plain = plain_model()
    rule = RULES["chain"]
    state, other = oj.setup(rule, model), oj.setup(rule, plain)
    step, single = oj.make_step(loss, donate=donate), oj.make_step(loss)
    shardings = jax.tree.map(lambda x: x.sharding, model)
    for t in range(3):
        with compilations() as compiled:
            state, model, _ = jax.block_until_ready(step(state, model))
        assert not (t and compiled), "a later step compiled again"
        other, plain, _ = single(other, plain)
    lies_at(model, shardings)
    lies_like(state, model)
    close(model, plain)
    state, model, _ = step.scan(state, model, length=2)
    other, plain, _ = single.scan(other, plain, length=2)
    lies_at(model, shardings)
    lies_like(state, model)
    close(model, plain)


@pytest.mark.parametrize("axes", AXES)
def test_eager_update_on_a_mesh(axes):
    """Someone steps by hand in a notebook, without `jit` and without a global mesh."""
    model = sharded_model(mesh_of(axes))
    state = oj.setup(oj.Adam(0.1), model)
    after, new = oj.update(state, model, model)
    lies_like(after, model)
    assert signatures((after, new)) == signatures((state, model))
    plain = plain_model()
    close(new, oj.update(oj.setup(oj.Adam(0.1), plain), plain, plain)[1])


@pytest.mark.parametrize("how", ["jit", "shapes", "jit of shapes"])
@pytest.mark.parametrize("axes", AXES)
def test_setup_inside_jit_lies_like_the_parameters(axes, how):
    """`jit(setup)` must not put whole moments on the first device, or ask for a mesh.

    In the last two nothing but shapes that name a sharding is there yet. (Explicit axes
    inside a jit that has no argument are in need of a mesh; that is JAX's own rule.)
    """
    mesh = mesh_of(axes)
    model = sharded_model(mesh)
    if how == "jit":
        state = jax.jit(lambda m: oj.setup(oj.Adam(0.1), m))(model)
    else:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model
        )
        state = oj.setup(oj.Adam(0.1), shapes)
        if how == "jit of shapes":
            with jax.set_mesh(mesh):
                state = jax.jit(lambda: oj.setup(oj.Adam(0.1), shapes))()
    eager = oj.setup(oj.Adam(0.1), model)
    assert signatures(state.inner) == signatures(eager.inner)
    for name, x in model.items():
        for moment in state.slots[name]:
            assert moment.sharding.is_equivalent_to(x.sharding, x.ndim), name


@pytest.mark.parametrize("axes", AXES)
def test_setup_and_update_under_a_global_mesh(axes):
    """`jax.set_mesh` around a program changes nothing about it."""
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        model = sharded_model(mesh)
        state = oj.setup(RULES["chain"], model)
        state, model = jax.jit(oj.update)(state, model, sharded_model(mesh, 1))
        state, model, _ = oj.make_step(loss)(state, model)
    lies_like(state, model)
    plain = plain_model()
    other, plain = oj.update(oj.setup(RULES["chain"], plain), plain, plain_model(1))
    close(model, oj.make_step(loss)(other, plain)[1])


def test_two_axes_with_different_shardings_per_leaf():
    """Tensor parallelism: each leaf is split along axes of its own."""
    mesh = mesh_of("auto", (2, 4), ("x", "y"))
    specs = {"w": P("x", "y"), "b": P("y"), "s": P()}
    model = {
        k: jax.device_put(v, NamedSharding(mesh, specs[k]))
        for k, v in plain_model().items()
    }
    state = oj.setup(oj.Adam(0.1), model)
    lies_like(state, model)
    state, new = jax.jit(oj.update)(state, model, model)
    lies_like(state, new)
    close(new["w"], model["w"] - 0.1 * jnp.sign(model["w"]))


def test_gradient_that_lies_elsewhere_moves_no_sharding():
    """A replicated gradient of a split parameter must not replicate the parameter."""
    mesh = mesh_of("auto")
    model = sharded_model(mesh)
    grads = jax.device_put(plain_model(1), NamedSharding(mesh, P()))
    state = oj.setup(oj.Adam(0.1), model)
    for run in (oj.update, jax.jit(oj.update)):
        after, new = run(state, model, grads)
        lies_like(after, model)
        for name, x in model.items():
            assert new[name].sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("axes", AXES)
def test_tied_sharded_arrays_are_one_slot_and_can_be_donated(axes):
    """Sharded arrays over the same buffers are one array, in whatever objects."""
    mesh = mesh_of(axes)
    place = NamedSharding(mesh, P("x"))
    w = jax.device_put(plain_model()["w"], place)
    model = jax.device_put(Pair(w, w), place)
    if model.encoder is model.decoder:
        model = Pair(w, jax.device_put(w, place, may_alias=True))
    assert buffers(model.encoder) == buffers(model.decoder), "else this tests nothing"
    state = oj.setup(oj.SGD(0.1), model)
    assert list(state.slots) == ["encoder"]
    step = oj.make_step(lambda m: jnp.sum(m.encoder * m.decoder), donate=True)
    for _ in range(2):
        state, model, _ = step(state, model)
        assert model.encoder is model.decoder
    close(model.encoder, plain_model()["w"] * 0.8**2)


def test_equal_arrays_with_different_shardings_are_no_tie():
    """Whole on one device and split over four: two arrays, not one in two places."""
    mesh = mesh_of("auto")
    whole = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P()))
    split = jax.device_put(whole, NamedSharding(mesh, P("x")))
    assert len(oj.setup(oj.SGD(0.1), [whole, split]).slots) == 2


@pytest.mark.parametrize("change", ["adjust", "freeze", "align"])
def test_live_changes_on_a_mesh_stay_on_it(change):
    """A scalar that `adjust` leaves on device 0 would compile the next step again."""
    mesh = mesh_of("auto")
    model = sharded_model(mesh)
    state = oj.setup(oj.Adam(0.1), model)
    run = jax.jit(Counter(oj.update))
    grads = sharded_model(mesh, 1)
    if change == "align":
        grads = {**grads, "b": None}
        state = oj.align(state, grads)
    if change == "freeze":
        state = oj.freeze(state, "b")
    state, model = jax.block_until_ready(run(state, model, grads))
    for t in range(3):
        if change == "adjust":
            state = oj.adjust(state, learning_rate=0.1 / (t + 2))
        lies_like(state, model)
        with compilations() as compiled:
            state, model = jax.block_until_ready(run(state, model, grads))
        assert not (compiled and (t or change == "adjust")), "compiled again"


def test_first_skip_on_a_mesh():
    """The count of its own that a skipped slot gets lies on the mesh as well."""
    mesh = mesh_of("auto")
    model = sharded_model(mesh)
    state = oj.setup(oj.Adam(0.1), model)
    for run in (oj.update, jax.jit(oj.update)):
        after, new = run(state, model, {**sharded_model(mesh, 1), "b": None})
        lies_like(after, model)
        same_bits(new["b"], model["b"])


def test_global_norm_of_sharded_gradients_is_the_norm_of_the_whole():
    """A norm per device would clip each shard on its own."""
    mesh = mesh_of("auto")
    rule = oj.Chain(oj.ClipByGlobalNorm(0.5), oj.SGD(1.0))
    model, plain = sharded_model(mesh), plain_model()
    sharded = jax.jit(oj.update)(oj.setup(rule, model), model, sharded_model(mesh, 1))
    whole = oj.update(oj.setup(rule, plain), plain, plain_model(1))
    close(sharded[1], whole[1])


def test_update_inside_shard_map():
    """Data parallelism by hand: each device averages gradients and takes one step."""
    mesh = mesh_of("auto")
    model = {"w": jnp.array([1.0, -2.0, 0.5])}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    state = oj.setup(oj.Adam(0.1), model)

    def fit(m, x):
        return jnp.mean((x @ m["w"] - 1.0) ** 2)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P()
    )
    def parallel(state, model, x):
        local = jax.tree.map(lambda w: jax.lax.pcast(w, "x", to="varying"), model)
        grads = jax.lax.pmean(jax.grad(fit)(local, x), "x")
        return oj.update(state, model, grads)

    expected, reference = state, model
    for _ in range(2):
        state, model = parallel(state, model, x)
        expected, reference = oj.update(
            expected, reference, jax.grad(fit)(reference, x)
        )
        close(model, reference)
    assert signatures(state) == signatures(expected)


def test_setup_inside_shard_map_trains_each_shard():
    """Each device may hold its own part, with its own state, inside a `shard_map`."""
    mesh = mesh_of("auto")
    w = plain_model()["w"]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def train(w):
        state, model = oj.setup(oj.Adam(0.1), {"w": w}), {"w": w}
        for _ in range(2):
            state, model = oj.update(state, model, {"w": 2 * model["w"]})
        return model["w"]

    model = {"w": w}
    state = oj.setup(oj.Adam(0.1), model)
    for _ in range(2):
        state, model = oj.update(state, model, {"w": 2 * model["w"]})
    close(train(w), model["w"])


def test_model_with_a_leaf_that_is_not_placed_yet():
    """An uncommitted scalar beside sharded arrays may go where it is needed."""
    mesh = mesh_of("auto")
    model = {**sharded_model(mesh), "s": jnp.float32(1.0)}
    state = oj.setup(oj.Adam(0.1), model)
    step = oj.make_step(loss)
    for t in range(4):
        with compilations() as compiled:
            state, model, _ = jax.block_until_ready(step(state, model))
        assert not (compiled and t > 1), "must settle after one step at the latest"


def test_model_on_another_device_than_the_first():
    """A state that ignores the device of its model fails at the first step."""
    device = jax.devices()[3]
    model = jax.device_put(plain_model(), device)
    state = oj.setup(RULES["chain"], model)
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {device}
    step = oj.make_step(loss)
    for t in range(3):
        with compilations() as compiled:
            state, model, value = jax.block_until_ready(step(state, model))
        assert not (t and compiled), "a later step compiled again"
    assert value.devices() == {device}


def test_one_bad_number_on_one_device_skips_the_step_on_all():
    """Else a replicated parameter would differ from device to device."""
    mesh = mesh_of("auto", names=("d",))
    x = {"a": jnp.ones(8), "r": jnp.ones(1)}
    specs = {"a": P("d"), "r": P()}
    bad = {"a": x["a"].at[3].set(jnp.nan), "r": x["r"]}

    for rule in (
        oj.SkipNonFinite(oj.SGD(0.1)),
        oj.Accumulate(oj.SkipNonFinite(oj.SGD(0.1)), every=1),
        oj.LossScaling(oj.SGD(0.1)),
    ):

        def two(x, g, bad, rule=rule):
            state = oj.setup(rule, x)
            state, x = oj.update(state, x, bad)
            return oj.update(state, x, g)[1]

        split = jax.shard_map(
            two, mesh=mesh, in_specs=(specs, specs, specs), out_specs=specs
        )
        close(jax.jit(split)(x, x, bad), jax.jit(two)(x, x, bad))


@pytest.mark.parametrize(
    "rule",
    [oj.PolyakSGD(10.0), oj.LBFGS(line_search=None), oj.LBFGS(), oj.Prodigy(d0=0.1)],
    ids=repr,
)
def test_products_of_parts_are_those_of_the_whole(rule):
    """Else each device would go its own way along its own part of a direction."""
    mesh = mesh_of("auto", names=("d",))
    x = jnp.arange(1.0, 9.0)

    def steps(x):
        def value_fn(model):
            return total(model["w"] ** 4)

        state, model = oj.setup(rule, {"w": x}), {"w": x}
        for _ in range(3):
            value, grads = value_fn(model), {"w": 4 * model["w"] ** 3}
            context = {"value": value, "value_fn": value_fn}
            state, model = oj.update(state, model, grads, **context)
        return model["w"]

    split = jax.shard_map(steps, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    close(jax.jit(split)(x), jax.jit(steps)(x), rtol=1e-4)
