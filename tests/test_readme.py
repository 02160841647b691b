"""The README says what is so: its code runs as it stands, block after block."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMING_FROM = ROOT / "examples" / "coming_from.md"


def run(blocks, name):
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:  # a reader has JAX's usual settings
            exec(compile(block, name, "exec"), namespace)


def test_code_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    run(blocks, README.name)
    assert len(blocks) == 6
    assert "head" in capsys.readouterr().out


def test_pages_for_those_who_come_from_elsewhere_run():
    """Blocks, and the last cell of each row of the tables, in the order of the text."""
    pattern = r"^```python\n((?:.*\n)*?)```$|^\|.*\| `([^`]*)` \|$"
    text = COMING_FROM.read_text()
    pieces = re.findall(pattern, text, re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    heads = 2 * text.count("| --- |")
    assert sum(bool(cell) for _, cell in pieces) == len(rows) - heads
    run([block or cell for block, cell in pieces], COMING_FROM.name)


def test_commands_are_the_ones_that_ci_runs():
    commands = re.findall(r"```sh\n(.*?)\n```", README.read_text(), re.DOTALL)
    assert [c.rsplit(" && ")[-1] for c in commands] == [
        ".venv/bin/python examples/tied_lm.py",
        ".venv/bin/pytest -q -n auto",
    ]
