"""The names of leaves: how a path is written, matched by a glob, and complained of."""

import difflib
import fnmatch
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.tree_util import DictKey, KeyPath, keystr

__all__ = ["Slots"]

Path: TypeAlias = str
Glob: TypeAlias = str


class Slots(dict[Path, Any]):
    """A `dict` from path to value that is a pytree in its own order.

    JAX sorts the keys of a plain `dict` each time that it flattens one, which costs
    half a microsecond a leaf in every call of a compiled step. This one keeps the
    order of the model, and its keys are part of the tree's structure.

    >>> jax.tree.leaves(Slots({"w": 2, "b": 1}))
    [2, 1]
    """

    def __repr__(self) -> str:
        return f"Slots({super().__repr__()})"


jax.tree_util.register_pytree_with_keys(
    Slots,
    lambda slots: (tuple((DictKey(k), v) for k, v in slots.items()), tuple(slots)),
    lambda keys, values: Slots(zip(keys, values, strict=True)),
    lambda slots: (tuple(slots.values()), tuple(slots)),
)


def picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function of a dict or list: its items at `keys`, at the speed of C."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda items: tuple(items[key] for key in keys)


def spell(keypaths: Sequence[KeyPath]) -> list[Path]:
    """The text of each key path, `layers/0/weight`; never the same text twice.

    `{"a/b": x, "a": {"b": y}}` has two leaves that would both be called `a/b`; such
    leaves are written with brackets, `['a/b']` and `['a']['b']`, and numbered where
    even those agree.
    """
    paths = [keystr(keys, simple=True, separator="/") for keys in keypaths]
    if len(set(paths)) == len(paths):
        return paths
    seen: dict[Path, int] = {}
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
    taken = {path for path, times in seen.items() if times == 1}
    for i, path in enumerate(paths):
        if seen[path] > 1:
            text = long = keystr(keypaths[i])
            number = 1
            while text in taken:
                number += 1
                text = f"{long}#{number}"
            taken.add(text)
            paths[i] = text
    return paths


def parts(keypath: KeyPath) -> tuple[str, ...]:
    """A key path as plain words, whatever containers it leads through."""
    return tuple(keystr((key,), simple=True) for key in keypath)


def branches(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The words of a path, and those of every branch above it, up to the root."""
    return [words[:n] for n in range(len(words) + 1)]


def by_words(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves of `tree` by the words of their paths, in the order of the tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {parts(keys): x for keys, x in keyed}


def with_paths(tree: Any) -> dict[Path, Any]:
    """The leaves of `tree` by path, in the order of the tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return dict(zip(spell([k for k, _ in keyed]), (x for _, x in keyed), strict=True))


def matches(path: Path, glob: Glob) -> bool:
    """Whether `glob` names the leaf at `path`, or a branch that holds it.

    `*` stands for any text, slashes included, `?` for one character, `[ab]` for either.

    >>> matches("layers/3/w", "layers/3"), matches("layers/3/w", "*/w")
    (True, True)
    """
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, f"{glob}/*")


Where: TypeAlias = Glob | Iterable[Glob] | Callable[[Path, Any], bool] | None


def pattern(glob: Glob, known: Collection[Path]) -> Callable[[Path], bool]:
    """`glob` as a test; one that is a path as it stands is taken at its word."""
    if glob in known:
        return lambda path: path == glob
    # Asked only of what may be meant either way: this looks at all paths.
    if "[" in glob and any(path.startswith(f"{glob}/") for path in known):
        return lambda path: path.startswith(f"{glob}/")
    return lambda path: matches(path, glob)


def selector(
    where: Where, owner: str, known: Collection[Path] = ()
) -> Callable[[Path, Any], bool]:
    """`where` (a glob, several, a function of path and leaf, None for all) as a test.

    Args:
        known: the paths that there are; each of several globs must match one.
    Raises: ValueError if it does not; TypeError for anything else. A pytree is refused
    even where it is callable (a module shaped like the model): a tree is never called.
    """
    if where is None:
        return lambda path, leaf: True
    if isinstance(where, str):
        where = (where,)
    if callable(where) and jax.tree_util.all_leaves([where]):
        return lambda path, leaf: bool(where(path, leaf))
    if isinstance(where, (list, tuple, set, frozenset)) and all(
        isinstance(glob, str) for glob in where
    ):
        exact = {glob for glob in where if glob in known}
        tests = {glob: pattern(glob, known) for glob in where if glob not in exact}
        for glob, test in tests.items() if len(where) > 1 and known else ():
            if not any(map(test, known)):
                hint = nearest(glob, known)
                raise ValueError(f"{owner}: {glob!r} matches no trainable leaf.{hint}")
        return lambda path, leaf: (
            path in exact or any(test(path) for test in tests.values())
        )
    raise TypeError(
        f"{owner}: found {type(where).__name__}, expected a glob such as 'layers/0/*', "
        "several globs in a list, or a function of (path, leaf). A tree of masks or "
        "labels is not taken: write it as a function."
    )


def nearest(path: Path, known: Iterable[Path]) -> str:
    """` Did you mean 'layers/0/w'?`, or the paths that there are."""
    names = list(known)
    close = difflib.get_close_matches(path, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    listed = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    return f" The paths are {listed}."


def complain(function: str, problems: Mapping[Path, str], remedy: str = "") -> str:
    """One message for all offenders: five in full, the rest as a count."""
    lines = [
        f"{function}: {repr(path) if path else 'the model'}: {what}."
        for path, what in problems.items()
    ]
    if len(lines) > 5:
        lines[5:] = [f"... and {len(lines) - 5} more."]
    return "\n".join(lines) + (f" {remedy}" if remedy else "")
