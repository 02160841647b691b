"""The README says what is so: its code runs as it stands, block after block."""

import re
from pathlib import Path

import jax

README = Path(__file__).parents[1] / "README.md"


def test_code_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:  # a reader has JAX's usual settings
            exec(compile(block, README.name, "exec"), namespace)
    assert len(blocks) == 4
    assert "head" in capsys.readouterr().out


def test_commands_are_the_ones_that_ci_runs():
    commands = re.findall(r"```sh\n(.*?)\n```", README.read_text(), re.DOTALL)
    assert [c.rsplit(" && ")[-1] for c in commands] == [
        ".venv/bin/python examples/tied_lm.py",
        ".venv/bin/pytest -q -n auto",
    ]
