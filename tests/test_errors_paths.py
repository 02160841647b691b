"""Wrong paths, patterns, ties and groups are named, with what could be meant."""

import jax.numpy as jnp
import pytest
from helpers import Pair

import optimjax as oj


def model_of_layers():
    return {
        "layers": [{"w": jnp.ones((3, 1)), "b": jnp.ones(1)}, {"w": jnp.ones((2, 2))}],
        "rate": 0.5,
        "act": jnp.tanh,
    }


def state_of(model):
    return oj.setup(oj.Adam(0.1), model)


def test_adjust_of_what_is_not_there():
    """A misspelt `lr` must not be ignored."""
    state = state_of(model_of_layers())
    with pytest.raises(TypeError, match=r"adjust: .*'lr'.*b1.*b2.*eps.*learning_rate"):
        oj.adjust(state, lr=0.1)
    with pytest.raises(TypeError, match=r"adjust: .*momentum.*learning_rate"):
        oj.adjust(state, where="layers/0/*", momentum=0.1)
    with pytest.raises(ValueError, match=r"learning_rate.*-1.*>= 0"):
        oj.adjust(state, learning_rate=-1.0)
    with pytest.raises(ValueError, match=r"learning_rate.*'head'"):
        oj.adjust(state, learning_rate={"head": 0.1, "*": 0.2})
    groups = oj.Partition(
        {"x": oj.Adam(0.1), "y": oj.SGD(0.1)}, {"layers/0/*": "x", "*": "y"}
    )
    state = oj.setup(groups, model_of_layers())
    with pytest.raises(TypeError, match=r"adjust: .*b1.*learning_rate"):
        oj.adjust(state, where="layers/1/*", b1=0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda s, w: oj.adjust(s, where=w, learning_rate=0.1),
        lambda s, w: oj.freeze(s, w),
        lambda s, w: oj.thaw(s, w),
    ],
    ids=["adjust", "freeze", "thaw"],
)
@pytest.mark.parametrize(
    "where",
    ["layers/7/*", "layer", "rate", ["layers/0/*", "nothing"], lambda p, x: False],
    ids=["glob", "prefix", "not trained", "one of two", "function"],
)
def test_where_that_matches_nothing(call, where, request):
    """A frozen layer that is not frozen shows up days later, if ever."""
    name = request.node.callspec.id.split("-")[-1]
    with pytest.raises(ValueError, match=f"{name}: ") as caught:
        call(state_of(model_of_layers()), where)
    if isinstance(where, str):
        assert where in str(caught.value)
    if isinstance(where, list):
        assert "nothing" in str(caught.value)
    assert "layers/" in str(caught.value), "what could have been meant"


def test_decay_mask_that_matches_nothing():
    """A mask with a typing error would decay nothing, or all but what was meant."""
    model = {"body": jnp.ones(2), "head": jnp.ones(2)}
    for rule in (
        oj.AdamW(decay_where="bodi"),
        oj.WeightDecay(where=["body", "hed"]),
        oj.Chain(oj.Adam(), oj.WeightDecay(where="bodi/*")),
    ):
        with pytest.raises(ValueError, match=r"(AdamW|WeightDecay): .*(bodi|hed)"):
            oj.setup(rule, model)


@pytest.mark.parametrize(
    ("ties", "text"),
    [
        ({"nothing": "encoder"}, "'nothing'.*encoder"),
        ({"decoder": "nothing"}, "'nothing'.*encoder"),
        ({"decoder": "encoder"}, r"(?=.*'decoder')(?=.*'encoder')(?=.*3, 2).*2, 3"),
        ({"decoder": ("encoder", jnp.ravel)}, r"'decoder'(?=.*\b6\b).*3, 2"),
        (
            {"decoder": ("encoder", lambda x: x.T.astype(jnp.float16))},
            "decoder.*float16",
        ),
        ({"decoder": "decoder"}, "decoder.*ties="),
        ({"decoder": ("encoder", jnp.transpose), "encoder": "decoder"}, "ties="),
        ({"note": "encoder"}, "note"),
    ],
    ids=["place", "source", "shape", "transform", "dtype", "itself", "circle", "text"],
)
def test_ties_that_cannot_be(ties, text):
    """A tie that is declared wrongly must not be dropped, nor broadcast."""
    model = {"encoder": jnp.ones((2, 3)), "decoder": jnp.ones((3, 2)), "note": "text"}
    with pytest.raises((ValueError, TypeError), match=f"(?s)setup: .*{text}"):
        oj.setup(oj.SGD(0.1), model, ties=ties)


@pytest.mark.parametrize("ties", ["all", True, ["decoder"], {"decoder": 3}])
def test_ties_of_another_kind(ties):
    """What `ties=` takes is said where something else is given."""
    model = Pair(jnp.ones(2), jnp.ones(2))
    with pytest.raises((ValueError, TypeError), match=r"setup: .*ties"):
        oj.setup(oj.SGD(0.1), model, ties=ties)


def test_tied_array_in_two_groups():
    """Two rules for one array: neither may win in silence."""
    w = jnp.ones((2, 2))
    model = {"embed": w, "head": w, "b": jnp.ones(2)}
    rules = {"first": oj.Adam(0.1), "second": oj.SGD(0.1)}
    for labels in (
        {"embed": "first", "*": "second", "head": "second"},
        lambda path, leaf: "first" if path == "embed" else "second",
    ):
        both = oj.Partition(rules, labels)
        for rule in (both, oj.Chain(oj.ClipByGlobalNorm(), both)):
            with pytest.raises(ValueError, match=r"embed.*head|head.*embed") as caught:
                oj.setup(rule, model)
            assert "Adam" in str(caught.value) and "SGD" in str(caught.value)
    state = oj.setup(oj.Partition(rules, {"*e*d": "first", "b": "second"}), model)
    assert len(oj.trainables(model)) == len(state.slots) == 2
    # `*` is for what nothing names: one name speaks for all places of an array.
    state = oj.setup(oj.Partition(rules, {"embed": "first", "*": "second"}), model)
    assert "b1" in oj.hyperparams(state)["embed"]


def test_tied_array_with_two_values_or_half_trained():
    """One array has one rate, and is trained or not."""
    w = jnp.ones((2, 2))
    model = {"embed": w, "head": w}
    for rate in ({"embed": 0.1, "head": 0.2}, oj.by_path(lambda p, x: len(p) / 10)):
        with pytest.raises(ValueError, match=r"learning_rate.*'head'.*'embed'") as e:
            oj.setup(oj.SGD(rate), model)
        assert "one array" in str(e.value)
    with pytest.raises(ValueError, match=r"(?s)'head'.*'embed'|'embed'.*'head'"):
        oj.setup(oj.SGD(0.1), model, trainable="embed")
    assert len(oj.setup(oj.SGD({"embed": 0.1, "head": 0.1}), model).slots) == 1


def test_groups_and_values_by_path_that_do_not_cover_the_model():
    """A slot without a rule or a rate, or a pattern for nothing, is named."""
    model = {"body": jnp.ones(2), "head": jnp.ones(2)}
    rules = {"x": oj.SGD(0.1), "y": oj.Adam(0.1)}
    for labels, text in [
        ({"body": "x"}, "head"),
        ({"body": "x", "head": "z"}, "'z'"),
        ({"bodi": "x", "*": "y"}, "bodi"),
        (lambda path, leaf: "x" if path == "body" else None, "head"),
    ]:
        with pytest.raises(ValueError, match=f"Partition: .*{text}"):
            oj.setup(oj.Partition(rules, labels), model)
    for rate, text in [({"body": 0.1}, "head"), ({"bodi": 0.1, "*": 0.2}, "bodi")]:
        with pytest.raises(ValueError, match=f"SGD: learning_rate: .*{text}"):
            oj.setup(oj.SGD(rate), model)
