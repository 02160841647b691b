"""Every rule reaches the minimum of three small problems: it does optimise.

The problems, the hyperparameters, how many steps they take and how close is close
enough stand in `TUNED` and beside it in examples/gallery.py, which draws what is tested
here. That each rule takes the right steps is tested elsewhere, number by number.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import rule_classes

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import gallery

from optimjax import rules

NAMES = [name for name in rule_classes() if name in rules.__all__]


@pytest.mark.parametrize("name", NAMES)
def test_rule_reaches_the_minimum(name):
    try:
        gallery.tuned(name)
    except LookupError as error:
        pytest.fail(str(error))
    runs = gallery.cross(name) | {"digits": gallery.fit(name)}
    for problem, run in runs.items():
        assert np.all(np.isfinite(run.losses)), problem
        assert run.losses[-1] <= gallery.ENOUGH[problem], problem
        assert run.losses[0] > 100 * gallery.ENOUGH[problem], problem


def test_the_table_is_of_rules():
    names = [name for family in gallery.TUNED.values() for name in family]
    assert len(names) == len({*names})
    assert {*names} <= {*NAMES}


def test_a_rule_missing_in_the_table_fails():
    with pytest.raises(LookupError, match="Unwritten is not in TUNED of examples/gall"):
        gallery.tuned("Unwritten")


@pytest.mark.parametrize("problem", ["bowl", "valley"])
def test_minima_are_where_the_pictures_show_them(problem):
    at = {"x": np.array(gallery.MINIMA[problem], np.float32)}
    for sign in (-1, 1):
        near = {"x": at["x"] + sign * np.float32(0.01)}
        assert gallery.landscape(near, problem == "valley")[0] > 1e-6
    assert gallery.landscape(at, problem == "valley")[0] < 1e-12


def test_bowl_has_the_condition_number_that_it_is_said_to_have():
    def bowl(x):
        return gallery.landscape({"x": x}, False)[0]

    eigenvalues = np.linalg.eigvalsh(jax.hessian(bowl)(gallery.START))
    assert eigenvalues == pytest.approx([1.0, 100.0], rel=1e-4)


def test_pictures_are_drawn(tmp_path):
    """With runs made up, so that nothing is trained."""
    losses = np.geomspace(10, 1e-7, 50)
    names = [name for family in gallery.TUNED.values() for name in family]
    runs = {
        name: {
            problem: gallery.Run(losses, np.linspace(gallery.START, end, len(losses)))
            for problem, end in gallery.MINIMA.items()
        }
        for name in names
    }
    gallery.draw_paths(runs, tmp_path / "paths.png")
    gallery.draw_digits(dict.fromkeys(names, losses), tmp_path / "digits.png")
    for name in ("paths.png", "digits.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert gallery.arrives(runs["SGD"]["bowl"], "bowl") == np.argmax(losses <= 1e-3)
    assert (
        gallery.arrives(gallery.Run(losses, None)._replace(losses=losses[:9]), "bowl")
        is None
    )
