"""What schedules say: errors, how they print, their documentation, their example."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj
from optimjax import schedules as s

EXAMPLE = Path(__file__).parents[1] / "examples"
MODEL = {"w": jnp.array([0.4, -1.3])}

MISTAKES = [
    (lambda: s.Cosine(1.0, -3), ValueError, "Cosine: steps is -3, expected > 0."),
    (lambda: s.Cosine(1.0, 0), ValueError, "steps is 0, expected > 0."),
    (lambda: s.Cosine(1.0, jnp.array(-3)), ValueError, "steps is -3, expected > 0."),
    (
        lambda: s.Linear(1, jnp.nan, 3),
        ValueError,
        "Linear: end is nan, expected a finite",
    ),
    (lambda: s.Linear("a", 1, 3), TypeError, "start is 'a', expected a number."),
    (lambda: s.Linear(True, 1, 3), TypeError, "start is True, expected a number."),
    (lambda: s.Linear({"*": 1}, 1, 3), TypeError, "expected a number."),
    (lambda: s.Linear((1, 2), 1, 3), TypeError, "start is (1, 2), expected a number."),
    (
        lambda: s.Linear(s.Constant(1), 1, 3),
        TypeError,
        "start is Constant(value=1), exp",
    ),
    (lambda: s.Linear(None, 1, 3), TypeError, "start is None, expected a number."),
    (lambda: s.Warmup("a", 3), TypeError, "expected a number or a schedule."),
    (
        lambda: s.WarmupCosine(1, 9, 8),
        ValueError,
        "warmup_steps is 9, expected at most 8",
    ),
    (
        lambda: s.Trapezoid(1, 3, 8, 6),
        ValueError,
        "warmup_steps + decay_steps is 9, exp",
    ),
    (
        lambda: s.OneCycle(1, 9, back=0.1),
        ValueError,
        "warmup is 0.3, expected at most 0.1",
    ),
    (
        lambda: s.OneCycle(1, 9, shape="cos"),
        ValueError,
        "expected 'cosine' or 'linear'.",
    ),
    (lambda: s.CosineRestarts(1, 9, 0.5), ValueError, "factor is 0.5, expected >= 1."),
    (
        lambda: s.Piecewise((1, 2), (3, 4)),
        ValueError,
        "2 values for 2 boundaries, expe",
    ),
    (lambda: s.Piecewise((1, 2, 3), (5, 4)), ValueError, "boundaries has 5 before 4"),
    (lambda: s.Piecewise((1, 2), 5), TypeError, "boundaries is 5, expected a tuple of"),
    (lambda: s.Join(s.Constant(1), ()), TypeError, "expected a tuple of schedules."),
    (
        lambda: s.Cyclic(1, 2, 3, mode="up"),
        ValueError,
        "mode is 'up', expected 'triang",
    ),
    (
        lambda: s.Linear(1, 2, 3)(0.5),
        TypeError,
        "Linear: count is float32, expected an",
    ),
    (lambda: s.Constant(jnp.ones(2))(0), ValueError, "use jax.vmap over the schedule"),
]


@pytest.mark.parametrize("case", range(len(MISTAKES)))
def test_mistakes(case):
    make, error, text = MISTAKES[case]
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_tracers_are_not_checked():
    traced = jax.jit(lambda steps: s.WarmupCosine(0.3, steps, 8, 0.1)(jnp.arange(12)))
    assert np.isfinite(traced(9)).all()


def test_what_is_printed():
    rate = s.WarmupCosine(peak=1e-3, warmup_steps=100, steps=10_000)
    text = "WarmupCosine(peak=0.001, warmup_steps=100, steps=10000)"
    assert repr(rate) == text
    state = oj.setup(oj.SGD(rate), MODEL)
    assert text in repr(state)


@pytest.mark.parametrize("name", s.__all__)
def test_documentation(name):
    text = inspect.getdoc(getattr(s, name))
    assert "\n>>> " in text
    if name != "Schedule":
        assert "Args:" in text
        assert "Raises:" in text


def test_example_draws_every_schedule(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import schedules

    curves = schedules.main(["--out", str(tmp_path)])
    assert {type(x) for _, x, _ in curves} == {
        getattr(s, name) for name in s.__all__
    } - {s.Schedule}
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")
    assert "WarmupCosine(peak=1, warmup_steps=100" in capsys.readouterr().out
