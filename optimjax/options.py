"""Options of a rule that are structure: what they may be, and one complaint for all."""

from typing import Any

__all__ = []


def one_of(rule: Any, name: str, expected: tuple[Any, ...]) -> None:
    """ValueError if an option is none of those that there are."""
    found = getattr(rule, name)
    if found not in expected:
        listed = ", ".join(map(repr, expected))
        raise ValueError(
            f"{type(rule).__name__}: {name} is {found!r}, expected one of {listed}."
        )


def at_least_one(rule: Any, *names: str) -> None:
    """ValueError if an option that counts something is below 1."""
    for name in names:
        found = getattr(rule, name)
        if found < 1:
            raise ValueError(
                f"{type(rule).__name__}: {name} is {found}, expected >= 1."
            )
