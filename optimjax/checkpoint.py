"""A state as plain dicts of arrays, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimjax.arrays import is_array, is_traced
from optimjax.leaf import own_counts, skipping
from optimjax.paths import Path, by_words, complain
from optimjax.state import State, as_state

__all__ = ["state_from_dict", "state_to_dict"]

VERSION = 1


def state_to_dict(state: State, *, flat: bool = False) -> dict[str, Any]:
    """A state as plain nested dicts of arrays, for any format that can hold them.

    Under `rule` are the hyperparameters, under `inner` what the rule keeps, by path;
    `frozen` and `places` say which slots are frozen and which leaves are one array,
    and `version` is that of this layout.

    Args:
        flat: one dict, with keys such as `inner/slots/layers/0/w/m`, as `numpy.savez`
            and safetensors want it.
    Returns: dicts with text for keys and arrays, uncopied, for values.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.SGD(0.1, momentum=0.9), {"w": jnp.ones(2)})
    >>> sorted(state_to_dict(state, flat=True))[:3]
    ['inner/count', 'inner/slots/w/v', 'places/w']
    >>> state_to_dict(state)["inner"]["slots"]["w"]
    {'v': Array([0., 0.], dtype=float32)}
    """
    as_state(state, "state_to_dict")
    words = by_words(state)
    words["version",] = np.int32(VERSION)
    for number, slot in enumerate(state.ties.slots):
        frozen = slot.name in state.frozen
        words |= {("frozen", slot.name): np.bool_(True)} if frozen else {}
        words |= {("places", place.path): np.int32(number) for place in slot.places}
    if flat:
        return {"/".join(key): x for key, x in words.items()}
    nested: dict[str, Any] = {}
    for key, x in words.items():
        branch = nested
        for word in key[:-1]:
            branch = branch.setdefault(word, {})
        branch[key[-1]] = x
    return nested


def state_from_dict(state: State, saved: Mapping[str, Any]) -> State:
    """`state`, with all values as `state_to_dict` saved them.

    The structure, the ties and the places on devices are those of `state`: call `setup`
    as it was called in the first place. Identity is lost on a disk, so give it the
    model as it was built, not as it was loaded, or declare the ties.

    Args:
        state: a state of the same rule and a model with the same paths.
        saved: nested or flat, with arrays of any library for values.
    Raises: ValueError that names what is missing, left over, or of another shape or
        dtype, or which leaves were one array and are not; nothing is half restored.

    >>> import optimjax as oj
    >>> model = {"w": jnp.ones(2)}
    >>> state = oj.setup(oj.SGD(0.1, momentum=0.9), model)
    >>> later, _ = oj.update(state, model, {"w": jnp.ones(2)})
    >>> state_from_dict(state, state_to_dict(later)).slots["w"].v
    Array([1., 1.], dtype=float32)
    """
    as_state(state, "state_from_dict")
    given = dict(_flat(saved))
    version = int(np.asarray(given.pop("version", 0)))
    if version != VERSION:
        raise ValueError(
            f"state_from_dict: version {version}, expected {VERSION}. This was not "
            "made by state_to_dict, or by that of another version of optimjax."
        )
    places = {p: given.pop(p) for p in list(given) if p.startswith("places/")}
    frozen = {p: given.pop(p) for p in list(given) if p.startswith("frozen/")}
    _refuse_other_ties(state, {p.partition("/")[2]: int(n) for p, n in places.items()})
    still = sorted(path.partition("/")[2] for path in frozen)
    possible = own_counts({"inner": skipping(state.inner, state.ties.names)})
    alone = {words[-1] for words in possible if "/".join(words) in given}
    inner = skipping(state.inner, [name for name in state.ties.names if name in alone])
    template = State(state.rule, inner, state.ties, tuple(still))
    problems: dict[Path, str] = {}
    new = []
    left = dict(given)
    for key, old in by_words(template).items():
        path = "/".join(key)
        left.pop(path, None)
        places = [path, *map("/".join, possible.get(key, ()))]
        value = next((given[place] for place in places if place in given), None)
        if value is None:
            problems[path] = "nothing saved"
            continue
        value = _as_saved(value, old.dtype)
        if np.shape(value) != np.shape(old) or value.dtype != old.dtype:
            problems[path] = (
                f"{value.dtype.name}{list(np.shape(value))}, expected "
                f"{old.dtype.name}{list(np.shape(old))}"
            )
        new.append(_placed_like(value, old))
    problems |= dict.fromkeys(left, "saved, but nothing in this state")
    if problems:
        remedy = "Set the state up as it was: the same rule, options and paths."
        raise ValueError(complain("state_from_dict", problems, remedy))
    return jax.tree.structure(template).unflatten(new)


def _flat(saved: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found = []
    for word, x in saved.items():
        path = f"{above}/{word}" if above else str(word)
        found += _flat(x, path) if isinstance(x, Mapping) else [(path, x)]
    return found


def _refuse_other_ties(state: State, places: Mapping[Path, int]) -> None:
    here = {p.path: slot.name for slot in state.ties.slots for p in slot.places}
    first: dict[int, Path] = {}
    for path, number in places.items():
        first.setdefault(number, path)
    problems = {
        path: f"was one array with {first[number]!r}, and is not here"
        for path, number in places.items()
        if path in here and here[path] != here.get(first[number])
    }
    problems |= {
        path: f"is one array with {here[path]!r}, and was not"
        for path, number in places.items()
        if here.get(path) in places and places[here[path]] != number
    }
    if problems:
        remedy = "Call setup with the model as it was built, or with ties={...}."
        raise ValueError(complain("state_from_dict", problems, remedy))


def _as_saved(value: Any, dtype: Any) -> Any:
    """`value` as an array, also where npz has made raw bytes of bfloat16."""
    value = value if is_array(value) else np.asarray(value)
    if value.dtype.kind == "V" and value.dtype.itemsize == np.dtype(dtype).itemsize:
        return value.view(dtype)
    return value


def _placed_like(value: Any, old: Any) -> Any:
    if isinstance(old, jax.Array) and not is_traced(old) and old.committed:
        return jax.device_put(value, old.sharding)
    return jnp.asarray(value)
