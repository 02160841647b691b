"""A language model whose output projection is its embedding, trained three ways.

    python examples/tied_lm.py [--steps N] [--out FILE.png] [--seed S] [--quick]

A small decoder-only transformer learns the bytes of Python's own standard library. Its
model is a dict in which ONE array stands in two places, `embedding` and `head`. From
the same initial values, on the same batches, it is trained

* "one slot": by optimjax, which sees that the two places are one array, adds their two
  gradients and takes one step with one state;
* "two steps": as an optimiser does that goes leaf by leaf over the shared array: two
  leaves, so two states and two steps, and the one array takes both;
* "two arrays": as such an optimiser does under `jit`, which returns the two places as
  two arrays: they start equal and drift apart.

It prints the loss on files that no model has seen, in bits per byte (8 is knowing
nothing), a table and a sample of generated text, and draws the curves. It takes two to
three minutes on two CPU cores; `--quick` takes half a minute, and learns nothing.

Do not look for a winner: at this size the curves end within some hundredths of a bit,
which is what another seed makes, and their order changes with it and with the learning
rate. Two steps are another optimiser, with up to twice the rate for the shared array;
two arrays are another, larger model. What they cost, and what is left of the tie, is in
the table.
"""

import argparse
import math
import sysconfig
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.figure import Figure  # not pyplot: it needs no display
from tqdm import tqdm

import optimjax as oj

HEAD_WIDTH = 32  # of attention; not in the model, which holds nothing but arrays
SAMPLE = 500  # bytes
MEANING = {
    "one slot": "the gradients of both places summed, one state, one step",
    "two steps": "a state and a step for each place, both steps taken by the one array",
    "two arrays": "a state, a step and soon other values for each place: no tie left",
}
PROMPT = b'''import os


class Reader:
    """Read a file line by line."""

    def __init__(self, path):
        self.path = path

    def '''


class Settings(NamedTuple):
    """Sizes of a run. A window is `context` bytes and the byte after each of them."""

    width: int = 96
    layers: int = 2
    context: int = 64
    batch: int = 16
    steps: int = 1000
    chunk: int = 20  # steps per dispatch, between two moves of the progress bar
    every: int = 100  # steps between two looks at the validation loss
    peak: float = 8e-3  # learning rate
    held_out: int = 256  # windows of validation text
    corpus: int = 4_000_000  # bytes


QUICK = Settings(32, 1, 16, 4, steps=20, chunk=5, every=10, held_out=8, corpus=200_000)


# Text -------------------------------------------------------------------------------


def read_corpus(limit):
    """(training, validation) text, as bytes: whole files, every tenth held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files, size = [], 0
    for path in sorted(folder.glob("*.py")):
        if size < limit:
            files.append(path.read_bytes())
            size += len(files[-1])
    if len(files) < 2:
        raise FileNotFoundError(f"read_corpus: no source files in {folder}")
    training = b"\n".join(text for i, text in enumerate(files) if i % 10)
    return as_array(training), as_array(b"\n".join(files[::10]))


def as_array(text):
    return np.frombuffer(text, np.uint8)


def windows(text, starts, context):
    """Windows of `text`: one of (context + 1,) for each start."""
    return text[starts[..., None] + np.arange(context + 1)].astype(np.int32)


# Model ------------------------------------------------------------------------------


def init_model(key, s):
    """The model: a dict of arrays, in which `embedding` and `head` are one array."""
    keys = iter(jax.random.split(key, 1 + 4 * s.layers))

    def normal(rows, columns, gain=1.0):
        return gain / math.sqrt(rows) * jax.random.normal(next(keys), (rows, columns))

    def layer():
        calm = (2 * s.layers) ** -0.5  # keeps the sum over layers at its size
        return {
            "attention_norm": jnp.ones(s.width),
            "qkv": normal(s.width, 3 * s.width),
            "out": normal(s.width, s.width, calm),
            "mlp_norm": jnp.ones(s.width),
            "up": normal(s.width, 4 * s.width),
            "down": normal(4 * s.width, s.width, calm),
        }

    embedding = normal(s.width, 256).T
    return {
        "embedding": embedding,
        "layers": [layer() for _ in range(s.layers)],
        "norm": jnp.ones(s.width),
        "head": embedding,  # the tie: the same object, and nothing else to declare
    }


def normalise(x, gain):
    return gain * x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x):
    """Rotary positions: (batch, time, heads, HEAD_WIDTH), turned by its time."""
    time, half = x.shape[1], x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = (jnp.arange(time)[:, None] * frequency)[:, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attend(layer, x):
    batch, time, width = x.shape
    qkv = normalise(x, layer["attention_norm"]) @ layer["qkv"]
    q, k, v = jnp.split(qkv.reshape(batch, time, -1, HEAD_WIDTH), 3, axis=2)
    x = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return x.reshape(batch, time, width) @ layer["out"]


def logits(model, text):
    """Scores of the byte after each byte: (batch, time) -> (batch, time, 256)."""
    x = math.sqrt(model["norm"].size) * model["embedding"][text]
    for layer in model["layers"]:
        x = x + attend(layer, x)
        hidden = jax.nn.gelu(normalise(x, layer["mlp_norm"]) @ layer["up"])
        x = x + hidden @ layer["down"]
    return normalise(x, model["norm"]) @ model["head"].T


def loss(model, text):
    """Bits per byte of windows (batch, context + 1)."""
    log_p = jax.nn.log_softmax(logits(model, text[:, :-1]))
    chosen = jnp.take_along_axis(log_p, text[:, 1:, None], axis=-1)
    return -jnp.mean(chosen) / math.log(2)


evaluate = jax.jit(loss)


@partial(jax.jit, static_argnames="length")
def generate(model, prompt, key, *, length, temperature=0.7):
    """`length` bytes after `prompt` (time,); each sees as many bytes as the first."""

    def next_byte(window, key):
        scores = logits(model, window[None])[0, -1]
        byte = jax.random.categorical(key, scores / temperature).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    _, text = lax.scan(next_byte, prompt, jax.random.split(key, length))
    return text


# Training ---------------------------------------------------------------------------


def make_rule(s):
    def learning_rate(count):  # a schedule is any function of the count of updates
        warm_up = (count + 1) / (0.1 * s.steps)
        cosine = 0.5 + 0.5 * jnp.cos(jnp.pi * jnp.minimum(count / s.steps, 1))
        return s.peak * jnp.minimum(warm_up, 0.02 + 0.98 * cosine)

    return oj.Chain(
        oj.ClipByGlobalNorm(1.0),
        oj.AdamW(
            learning_rate,
            b2=0.98,
            weight_decay=0.1,
            decay_where=lambda path, x: x.ndim > 1,  # matrices, not gains
        ),
    )


def two_steps(state, model, text):
    """One training step as a leaf-by-leaf optimiser takes it; `state` has no ties.

    `grad` gives a partial gradient for each place, and each place has its own state.
    Adam makes a step of about `learning_rate` of either gradient, however small, so the
    array moves up to twice as far, in a direction that the sum of the gradients did not
    decide. It decays twice, and the norm that is clipped is that of the parts.
    """
    value, grads = jax.value_and_grad(loss)(model, text)
    state, moved = oj.update(state, model, grads)  # x - step_1 here, x - step_2 there
    both = moved["embedding"] + moved["head"] - model["embedding"]
    return state, {**moved, "embedding": both, "head": both}, value


@jax.jit
def scan_two_steps(state, model, texts):
    def step(carry, text):
        state, model, value = two_steps(*carry, text)
        return (state, model), value

    (state, model), values = lax.scan(step, (state, model), texts)
    return state, model, values


def by_two_steps(state, model, texts):
    """What `step.scan` does, by hand; without donation, which the tie would break."""
    state, model, values = scan_two_steps(state, model, texts)
    # `jit` returned two equal arrays, and the tie is lost unless it is made again.
    return state, {**model, "head": model["embedding"]}, values


def variants(rule, key, s):
    """{name: (advance, state, model)}: three ways to train from the same values."""
    scan = oj.make_step(loss, donate=True).scan

    # A model each, because `donate` gives its memory to the next one.
    tied, twice, apart = (init_model(key, s) for _ in range(3))
    apart["head"] = jnp.array(apart["head"], copy=True)
    return {
        "one slot": (scan, oj.setup(rule, tied), tied),  # nothing else to do
        "two steps": (by_two_steps, oj.setup(rule, twice, ties=None), twice),
        "two arrays": (scan, oj.setup(rule, apart), apart),
    }


def train(name, advance, state, model, corpus, s, seed):
    """(model, what there is to tell), after `s.steps` steps."""
    training, validation = corpus
    rng = np.random.default_rng(seed)
    starts = np.linspace(0, len(validation) - s.context - 1, s.held_out, dtype=int)
    held_out = windows(validation, starts, s.context)
    curves = {"training": {}, "validation": {}}  # {step: bits per byte}
    with tqdm(total=s.steps, desc=name, unit="step", mininterval=0.5) as bar:
        for done in range(s.chunk, s.steps + 1, s.chunk):
            starts = rng.integers(len(training) - s.context, size=(s.chunk, s.batch))
            texts = windows(training, starts, s.context)
            state, model, values = advance(state, model, texts)
            curves["training"][done] = float(values.mean())
            bar.set_postfix(loss=f"{values.mean():.3f}", refresh=False)
            bar.update(s.chunk)
            if done % s.every == 0 or done == s.steps:
                final = float(evaluate(model, held_out))
                curves["validation"][done] = final
                bar.write(f"{name:>10}, step {done:>4}: {final:.4f} bits/byte")
    return model, curves | measure(state, model) | {"final": final}


def measure(state, model):
    """What is kept, and how far the two places of the one array are from each other."""
    gap = jnp.linalg.norm(model["embedding"] - model["head"])
    return {
        "slots": len(state.slots),
        "numbers": sum(x.size for x in oj.trainables(model).values()),
        "state": sum(x.nbytes for x in jax.tree.leaves(state.inner)),
        "gap": float(gap / jnp.linalg.norm(model["embedding"])),
    }


# Results ----------------------------------------------------------------------------


def table(results):
    lines = [
        "variant     slots  trained numbers  state, bytes  embedding to head  "
        "validation, bits/byte"
    ]
    lines += [
        f"{name:<10}  {r['slots']:>5}  {r['numbers']:>15,}  {r['state']:>12,}  "
        f"{r['gap']:>16.0%}   {r['final']:>21.4f}"
        for name, r in results.items()
    ]
    lines += ["", *(f"{name:<10}  {MEANING[name]}" for name in results)]
    lines += ["", "The losses differ by what another seed makes; see the others' cost."]
    return "\n".join(lines)


def draw(results, path):
    """Losses of all variants, and how the others' differ from the first one's."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = zip(("#0072B2", "#D55E00", "#009E73"), ("-", "--", "-."), strict=True)
    first = np.array([*results["one slot"]["validation"].values()])
    for (name, r), (color, line) in zip(results.items(), looks, strict=True):
        look = {"color": color, "linestyle": line, "marker": "o", "markersize": 4}
        steps, bits = map(np.array, zip(*r["validation"].items(), strict=True))
        left.plot(*zip(*r["training"].items(), strict=True), color=color, alpha=0.3)
        left.plot(steps, bits, label=f"{name}: {r['final']:.3f}", **look)
        right.plot(steps, bits - first, label=name, **look)
    left.set(
        title="Validation loss (faint: training loss)",
        xlabel="step",
        ylabel="loss [bits/byte]",
    )
    right.set(
        title='Validation loss, less that of "one slot"',
        xlabel="step",
        ylabel="difference [bits/byte], above 0 is worse",
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def readable(text):
    """Bytes as printable ASCII, whatever a model made of them."""
    text = bytes(text.tolist()).decode("ascii", "backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, help="training steps, in whole chunks")
    parser.add_argument("--out", type=Path, default=Path("tied_lm.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny: half a minute")
    return parser.parse_args(argv)


def main(argv=None):
    """Train, report, and return {"variants": {name: what there is to tell}, ...}."""
    args = parse(argv)
    s = QUICK if args.quick else Settings()
    steps = s.steps if args.steps is None else args.steps
    s = s._replace(steps=max(1, math.ceil(steps / s.chunk)) * s.chunk)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(s.corpus)
    print(f"text: {corpus[0].size:,} bytes to train, {corpus[1].size:,} held out")
    key, sample_key = jax.random.split(jax.random.key(args.seed))

    runs, models, results = variants(make_rule(s), key, s), {}, {}
    print(oj.summary(runs["one slot"][1]), end="\n\n")
    for name, run in runs.items():
        models[name], results[name] = train(name, *run, corpus, s, args.seed)

    prompt = as_array(PROMPT)[-s.context :].astype(np.int32)
    text = generate(models["one slot"], prompt, sample_key, length=SAMPLE)
    sample = readable(text)
    draw(results, args.out)
    print(f"\n{table(results)}\n\nSample of the model with one slot, after the prompt:")
    print(f"{readable(prompt)}|{sample}\n\nCurves: {args.out}")
    return {"variants": results, "sample": sample, "figure": args.out}


if __name__ == "__main__":
    main()
