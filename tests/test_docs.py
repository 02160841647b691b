"""Every public name is explained, and shown where there is something to show."""

import inspect

import pytest
from cases import rule_classes

import optimjax as oj
from optimjax import testing

NAMES = [(oj, name) for name in oj.__all__ if name != "Hyper"]
NAMES += [(testing, name) for name in testing.__all__]
# Rules without arithmetic of their own have no paper.
UNSOURCED = {
    "Accumulate",
    "ApplyIf",
    "Chain",
    "Frozen",
    "Identity",
    "Masked",
    "Monitor",
    "Partition",
    "SkipNonFinite",
}


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_name_has_a_docstring(module, name):
    thing = getattr(module, name)
    text = inspect.getdoc(thing)
    assert text and text.splitlines()[0].endswith((".", ":", "?")), name
    if inspect.isfunction(thing):
        assert ">>>" in text, f"{name} has no example"
        taken = [p for p in inspect.signature(thing).parameters if p != "self"]
        if len(taken) > 2:
            assert "Args" in text, f"{name} does not say what its arguments are"


@pytest.mark.parametrize("name", rule_classes())
def test_rule_gives_equation_arguments_source_and_example(name):
    text = inspect.getdoc(rule_classes()[name])
    assert ">>>" in text
    assert "step" in text, "no equation of the step"
    if name not in UNSOURCED:
        assert "Source:" in text
    if name not in {"Frozen", "Identity"}:
        assert "Args:" in text
    assert "State:" in text


@pytest.mark.parametrize("name", rule_classes())
def test_rule_takes_its_arguments_in_the_order_in_which_it_writes_them(name):
    """A field that overrides a base's would keep the place that it has there."""
    taken = list(inspect.signature(rule_classes()[name]).parameters)
    written = [a for a in inspect.get_annotations(rule_classes()[name]) if a in taken]
    assert written == [a for a in taken if a in written]
