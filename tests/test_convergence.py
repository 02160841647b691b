"""The comparison of rules tunes, goes on where it stopped, and says what diverged."""

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import Partial

import optimjax as oj

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import convergence, ranking
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.measure import compiling
from benchmarks.problems import PROBLEMS, Problem

TARGET = jnp.array([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]])


def distance(model, shift):
    return jnp.sum((model["w"] + model["b"] - TARGET - shift) ** 2)


def tiny():
    """Matrices near one, in little noise."""
    return Problem(
        init=lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.ones((1, 2))},
        loss=distance,
        batches=lambda key, count: (0.1 * jax.random.normal(key, (count, 3, 2)),),
        held_out=(jnp.zeros((3, 2)),),
        unit="squares",
        steps=40,
    )


@pytest.fixture(autouse=True)
def usual_settings():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """The whole program, on the tiny problem."""
    monkeypatch.setitem(PROBLEMS, "tiny", tiny)

    def run(*rules, seeds=2, steps=20, problem="tiny"):
        sizes = ["--steps", str(steps), "--seeds", str(seeds), "--out", str(tmp_path)]
        argv = ["--rules", *rules, "--problems", problem, *sizes]
        return convergence.main(argv)[problem]

    return run


def written(folder):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    text = (folder / "convergence.json").read_text()
    return json.loads(text, parse_constant=refuse)


def test_results_are_shown_and_written(compare, tmp_path, capsys):
    rows = compare("SGD")
    assert [row["rule"] for row in rows] == ["SGD", "AdamW"]  # AdamW is always there
    assert rows[0]["mean"] < 0.1 < rows[1]["mean"]
    table = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [line.split("|")[1].strip() for line in table[2:]] == ["SGD", "AdamW"]
    assert f"{rows[0]['mean']:.4f} ± {rows[0]['deviation']:.4f}" in table[2]
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    found = written(tmp_path)
    assert found["summary"]["tiny"] == rows
    assert all(len(run["validation"]) == convergence.LOOKS for run in found["runs"])
    assert all(x > 0 for run in found["runs"] for pair in run["times"] for x in pair)
    reported = [r["seed"] for r in found["runs"] if r["final"] in rows[0]["finals"]]
    assert reported == [1, 2]  # 0 chose the learning rate


def test_a_finished_run_is_not_made_again(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "chart", lambda *args: None)
    first = compare("SGD")
    made, run = [], convergence.Trainer.run

    def noting(self, key, base):
        made.append(key)
        return run(self, key, base)

    monkeypatch.setattr(convergence.Trainer, "run", noting)
    assert compare("SGD") == first and made == []

    path, lost = tmp_path / "convergence.json", written(tmp_path)
    gone = lost["runs"].pop(-1)
    path.write_text(json.dumps(lost))
    again = compare("SGD")
    assert made == [convergence.Key(*(gone[k] for k in convergence.Key._fields))]
    assert again[0]["finals"] == first[0]["finals"]  # seeds decide all

    made.clear()
    compare("SGD", seeds=3)
    assert [(key.rule, key.seed) for key in made] == [("AdamW", 3), ("SGD", 3)]
    made.clear()
    compare("SGD", steps=40)
    assert len(made) >= 2 * (3 + 2)


def test_a_diverged_run_is_told_and_comes_last(compare, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CONTENDERS, "wild", Contender(lambda r: oj.SGD(r), 1e30))
    monkeypatch.setitem(CONTENDERS, "fixed", Contender(lambda r: oj.SGD(r), 0.1, False))
    rows = compare("wild", "fixed")
    assert [row["rule"] for row in rows] == ["fixed", "AdamW", "wild"]
    assert rows[-1]["diverged"] == 2 and rows[-1]["mean"] is None
    assert "diverged, 2 of 2" in capsys.readouterr().out
    runs = [run for run in written(tmp_path)["runs"] if run["rule"] == "wild"]
    assert {run["final"] for run in runs} == {None}
    assert all(len(run["validation"]) < convergence.LOOKS for run in runs)
    assert len(runs) == 3 + convergence.MORE + 2  # looked for a smaller rate in vain
    assert min(run["learning_rate"] for run in runs) == pytest.approx(3.16e27)
    fixed = [run for run in written(tmp_path)["runs"] if run["rule"] == "fixed"]
    assert [(run["learning_rate"], run["seed"]) for run in fixed] == [
        (0.1, 1),
        (0.1, 2),
    ]


@pytest.mark.parametrize(
    ("best", "tried"),
    [(0.01, 3), (0.0316, 4), (1.0, 7), (100.0, 7), (1e-4, 7)],
)
def test_the_grid_is_extended_until_the_best_is_inside(
    monkeypatch, tmp_path, best, tried
):
    class Fake:
        def __init__(self, *args):
            pass

        def run(self, key, base):
            return {"final": abs(math.log10(key.learning_rate / best))}

    class Bar:
        total = 0

        def set_postfix_str(self, text, refresh):
            pass

        def update(self):
            pass

    monkeypatch.setitem(PROBLEMS, "tiny", tiny)
    monkeypatch.setattr(convergence, "Trainer", Fake)
    runs = convergence.Runs(tmp_path / "convergence.json")
    reported = convergence.compare(runs, "tiny", "AdamW", 20, 1, Bar(), {})
    assert len(runs.by_key) == tried + 1
    nearest = min(best, 3.16)  # four factors of sqrt(10) from the edge
    assert [run["learning_rate"] for run in reported] == [nearest]


def test_another_learning_rate_compiles_nothing():
    trainer = convergence.Trainer(tiny(), CONTENDERS["AdamW"], 20)
    key = convergence.Key("tiny", "AdamW", 0.1, 1, 20)
    first = trainer.run(key, trainer)
    with compiling() as seen:
        second = trainer.run(key._replace(learning_rate=0.2, seed=2), trainer)
    assert not seen["compile"]
    assert first["final"] != second["final"]
    assert trainer.run(key, trainer)["validation"] == first["validation"]
    assert first["state_bytes"] == pytest.approx((2 * 4 * 8 + 4) / 8)


def test_schedules_fall_to_0_or_stay():
    falling = Partial(convergence.falling, 0.3, 100.0)
    rising = Partial(convergence.rising, 0.3, 100.0)
    assert float(falling(0)) == pytest.approx(0.06)
    assert float(falling(100)) == pytest.approx(0, abs=1e-6)
    assert float(falling(50)) == pytest.approx(0.15)
    assert float(rising(0)) == pytest.approx(0.06)
    assert float(rising(99)) == pytest.approx(0.3)


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_takes_its_learning_rate(name):
    contender, problem = CONTENDERS[name], tiny()
    step, batches = oj.make_step(problem.loss), problem.batches(jax.random.key(1), 3)
    moved = []
    for rate in (contender.centre, 1e-3 * contender.centre):
        rule = contender.make(Partial(convergence.falling, rate, 20.0))
        model = problem.init(jax.random.key(0))
        _, model, _ = step.scan(oj.setup(rule, model), model, *batches)
        moved.append(model["w"])
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in moved)
    assert bool(jnp.any(moved[0] != moved[1])) or not contender.tuned


def test_problems_begin_where_nothing_is_known():
    text, digits = PROBLEMS["text"](), PROBLEMS["digits"]()
    model = text.init(jax.random.key(0))
    assert str(oj.setup(oj.SGD(), model).ties) == "head is embedding"
    assert 7 < float(jax.jit(text.loss)(model, *text.held_out)) < 9.5
    (texts,) = text.batches(jax.random.key(1), 3)
    assert texts.shape == (3, 16, 33)

    model = digits.init(jax.random.key(0))
    assert model["second"]["kernel"].shape == (3, 3, 16, 32)
    assert 2.0 < float(jax.jit(digits.loss)(model, *digits.held_out)) < 3.0
    images, labels = digits.batches(jax.random.key(1), 3)
    assert (images.shape, labels.shape) == ((3, 32, 8, 8, 1), (3, 32))
    assert digits.held_out[0].shape == (389, 8, 8, 1)


def test_rows_are_sorted_and_count_from_the_losses():
    def run(validation, time=3.0):
        final = validation[-1] if len(validation) == 4 else None
        return {
            "steps": 40,
            "learning_rate": 0.1,
            "validation": validation,
            "final": final,
            "times": [[time, 2.0], [time, 1.0], [time, 2.0]],
            "state_bytes": 4.0,
        }

    results = {
        "AdamW": [run([4.0, 3.0, 2.0, 1.0], 2.0), run([4.0, 3.0, 2.0, 2.0], 2.0)],
        "fast": [run([2.0, 1.25, 1.0, 0.5]), run([4.0, 1.75, 1.5, 1.5])],
        "half": [run([2.0, 1.0]), run([4.0, 3.0, 1.0, 0.0])],
        "slow": [run([4.0, 4.0, 4.0, 3.0])] * 2,
    }
    rows = ranking.rows(results, "AdamW")
    assert [row["rule"] for row in rows] == ["fast", "AdamW", "slow", "half"]
    fast, base, slow, half = rows
    assert (fast["mean"], base["mean"], slow["deviation"]) == (1.0, 1.5, 0.0)
    assert fast["deviation"] == pytest.approx(math.sqrt(0.5))
    assert [row["steps_to_base"] for row in rows] == [20, 40, None, None]
    assert (fast["time"], base["time"]) == (1.5, 1.0)
    assert ranking.result(half) == "diverged, 1 of 2"
    assert "1.0000 ± 0.7071" in ranking.table(rows, "nats", "AdamW")
