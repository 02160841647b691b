"""What is updated: shapes of parameters. Nothing is trained here."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Shapes = dict[str, tuple[int, ...]]


class Model(NamedTuple):
    """Attributes: shapes by name; dtype of the parameters and of their gradients."""

    shapes: Shapes
    dtype: str = "float32"

    @property
    def numbers(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def arrays(self, seed: int) -> dict[str, jax.Array]:
        """Normal numbers, in buffers of their own."""
        rng = np.random.default_rng(seed)
        return {
            name: jnp.asarray(rng.standard_normal(shape, np.float32), self.dtype)
            for name, shape in self.shapes.items()
        }


def mlp() -> Shapes:
    widths = [784, 512, 512, 10]
    shapes: Shapes = {}
    for i, (n, m) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"{i}/w": (n, m), f"{i}/b": (m,)}
    return shapes


def gpt2(width: int = 768, layers: int = 12) -> Shapes:
    """GPT-2 small, 124 M numbers in 148 arrays; the output layer is the embedding."""
    shapes: Shapes = {"wte": (50257, width), "wpe": (1024, width)}
    for i in range(layers):
        for name, m in (("qkv", 3), ("proj", 1), ("fc", 4)):
            shapes |= {f"{i}/{name}/w": (width, m * width)}
            shapes |= {f"{i}/{name}/b": (m * width,)}
        shapes |= {f"{i}/out/w": (4 * width, width), f"{i}/out/b": (width,)}
        for norm in ("ln1", "ln2"):
            shapes |= {f"{i}/{norm}/scale": (width,), f"{i}/{norm}/bias": (width,)}
    return shapes | {"ln/scale": (width,), "ln/bias": (width,)}


def resnet50() -> Shapes:
    """25.6 M numbers in 161 arrays; a norm after each convolution."""
    shapes: Shapes = {}

    def conv(name: str, size: int, n: int, m: int) -> None:
        shapes[f"{name}/w"] = (size, size, n, m)
        shapes[f"{name}/scale"] = shapes[f"{name}/bias"] = (m,)

    conv("stem", 7, 3, 64)
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner, outer = 64 * 2**stage, 256 * 2**stage
        for block in range(blocks):
            name = f"{stage}/{block}"
            conv(f"{name}/a", 1, width, inner)
            conv(f"{name}/b", 3, inner, inner)
            conv(f"{name}/c", 1, inner, outer)
            if block == 0:
                conv(f"{name}/skip", 1, width, outer)
            width = outer
    return shapes | {"head/w": (width, 1000), "head/b": (1000,)}


def many(count: int, shape: tuple[int, ...]) -> Shapes:
    return {f"x{i:04}": shape for i in range(count)}


MODELS = {
    "20M": Model({"x": (20_000_000,)}),
    "MLP": Model(mlp()),
    "GPT-2": Model(gpt2()),
    "ResNet-50": Model(resnet50()),
    "300x(64,64)": Model(many(300, (64, 64))),
    "1000x(64,)": Model(many(1000, (64,))),
    "20M bf16": Model({"x": (20_000_000,)}, "bfloat16"),
    "MLP bf16": Model(mlp(), "bfloat16"),
    "GPT-2 bf16": Model(gpt2(), "bfloat16"),
}
