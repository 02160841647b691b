"""How arrays are read as matrices, and which of them are hidden matrices."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import same_bits

import optimjax as oj


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# Axes -------------------------------------------------------------------------------

LAYOUTS = {
    "dense": (oj.Axes(), (4, 6), [(1, 4, 6)]),
    "convolution": (oj.Axes(), (2, 2, 3, 5), [(1, 12, 5)]),
    "out first": (oj.Axes(outputs=0), (5, 3), [(1, 3, 5)]),
    "convolution, out first": (oj.Axes(outputs=0), (5, 3, 2, 2), [(1, 12, 5)]),
    "heads merged": (oj.Axes(outputs=(-2, -1)), (6, 2, 4), [(1, 6, 8)]),
    "heads": (oj.Axes(batch=1), (6, 2, 4), [(2, 6, 4)]),
    "layers and experts": (oj.Axes(batch=(0, 1)), (2, 3, 4, 5), [(6, 4, 5)]),
    "equal parts": (oj.Axes(split=(-1, 3)), (4, 6), [(3, 4, 2)]),
    "equal lengths": (oj.Axes(split=(0, (2, 2))), (4, 6), [(2, 2, 6)]),
    "unequal parts": (
        oj.Axes(split=(-1, (3, 1, 2))),
        (4, 6),
        [(1, 4, 3), (1, 4, 1), (1, 4, 2)],
    ),
    "parts of layers": (
        oj.Axes(batch=0, split=(2, (4, 2))),
        (3, 4, 6),
        [(3, 4, 4), (3, 4, 2)],
    ),
    "heads of layers": (oj.Axes(batch=0, split=(-1, 2)), (3, 5, 8), [(6, 5, 4)]),
    "parts in front": (
        oj.Axes(outputs=0, batch=1, split=(0, 2)),
        (4, 3, 5),
        [(6, 5, 2)],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_axes_take_apart_and_put_together(name):
    axes, shape, expected = LAYOUTS[name]
    x = jnp.arange(np.prod(shape)).reshape(shape)
    blocks = axes.matrices(x)
    assert [block.shape for block in blocks] == expected
    same_bits(axes.array(blocks, shape), x)
    axes.check(shape)
    assert axes.several(shape) == (expected[0][0] > 1 or len(expected) > 1)


def test_matrices_are_the_ones_that_are_meant():
    x = draw(6, 2, 4)
    for head in range(2):
        [block] = oj.Axes(batch=1).matrices(x)
        same_bits(block[head], x[:, head])
    [block] = oj.Axes(split=(-1, 3)).matrices(x[:, 0, :3])
    for part in range(3):
        same_bits(block[part], x[:, 0, part : part + 1])
    [window] = oj.Axes(outputs=0).matrices(x)
    same_bits(window[0].T, x.reshape(6, 8))


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        (oj.Axes(outputs=2), "shape (4, 6), which has no axis 2"),
        (oj.Axes(batch=(0, 1)), "an axis is of outputs and of batch"),
        (oj.Axes(outputs=(1, -1)), "of which (1, -1) are not different axes"),
        (oj.Axes(outputs=(0, 1)), "without a matrix"),
        (oj.Axes(split=(-1, 4)), "axis 1 cannot be split into 4"),
        (oj.Axes(split=(0, (2, 1))), "axis 0 cannot be split into (2, 1)"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_names_the_path(axes, complaint):
    model = {"body/w": draw(4, 6), "b": draw(6)}
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        oj.setup(oj.Muon(axes={"body/*": axes}), model)
    assert "Muon: 'body/w'" in str(caught.value)
    assert "by `axes`" in str(caught.value)
    assert "'b'" not in str(caught.value)


def test_a_vector_that_is_chosen_names_the_path():
    with pytest.raises(ValueError, match=r"Muon: 'b': shape \(6,\).* `matrices`"):
        oj.setup(oj.Muon(matrices=["w", "b"]), {"w": draw(4, 6), "b": draw(6)})


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="nowhere"):
        oj.setup(oj.Muon(matrices="nowhere"), {"w": draw(4, 6)})
    with pytest.raises(ValueError, match=r"'v/\*' matches no trainable leaf"):
        oj.setup(oj.Muon(axes={"v/*": oj.Axes()}), {"w": draw(4, 6)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"outputs": (0, 0)},
        {"outputs": 0.5},
        {"batch": "layers"},
        {"batch": [0, None]},
        {"split": 3},
        {"split": (-1, 0)},
        {"split": (-1, (3, -1))},
        {"split": (0.5, 2)},
        {"split": (0, ())},
    ],
    ids=str,
)
def test_axes_that_are_none_are_refused_where_they_are_written(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r}, expected")):
        oj.Axes(**wrong)
    with pytest.raises(TypeError, match="axes is 3, expected"):
        oj.Muon(axes=3)


def test_axes_are_one_value_however_they_are_written():
    axes = oj.Axes(outputs=[np.int64(-1)], split=[0, [2, np.int32(2)]])
    assert axes == oj.Axes(outputs=(-1,), split=(0, (2, 2)))
    assert hash(axes) == hash(oj.Axes(outputs=(-1,), split=(0, (2, 2))))
    assert repr(axes) == "Axes(outputs=(-1,), split=(0, (2, 2)))"


# Which slots ------------------------------------------------------------------------

NAMES = {
    "layers/0/mlp/kernel": True,
    "blocks.3.attention.query.weight": True,
    "encoder/Dense_0/kernel": True,
    "ahead/w": True,
    "headroom/w": True,
    "head_mixer/w": True,
    "MultiHeadAttention_0/query/kernel": True,
    "embedding": False,
    "token_embedding/weight": False,
    "embed_tokens/w": False,
    "params/Embed_0/embedding": False,
    "pos_emb": False,
    "wte": False,
    "transformer.wpe.weight": False,
    "lm_head/kernel": False,
    "head": False,
    "classifier/w": False,
    "Head_1/kernel": False,
    "logits/w": False,
    "output_layer/w": False,
}


@pytest.mark.parametrize("path", NAMES)
def test_hidden_matrices(path):
    assert oj.hidden_matrices(path, draw(4, 6)) == NAMES[path]
    assert not oj.hidden_matrices(path, draw(6))


def test_a_function_that_returns_no_axes_names_the_path():
    with pytest.raises(TypeError, match=r"'body/w': axes are None, expected Axes"):
        oj.setup(oj.Muon(axes=lambda path, x: None), {"body": {"w": draw(4, 6)}})
