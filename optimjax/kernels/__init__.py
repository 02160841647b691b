"""Optional compiled loops for updates on CPU, never needed for a right answer."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import jax

__all__ = ["off", "status"]

RULES = ("adam", "lion", "momentum")
_switched_on = True


@functools.cache
def _loaded() -> str:
    """Make the loops known to XLA. Returns: "" if that went well, else why not."""
    found = sorted(Path(__file__).parent.glob("_cpu*.so"))
    if not found:
        return "no compiled file: there was no C++ compiler when optimjax was installed"
    try:
        library = ctypes.CDLL(str(found[0]))
        for rule in RULES:
            handler = jax.ffi.pycapsule(getattr(library, f"optimjax_{rule}"))
            jax.ffi.register_ffi_target(f"optimjax_{rule}", handler, platform="cpu")
    except Exception as error:  # another jaxlib than the one it was compiled for
        return f"{found[0].name} cannot be used: {error}"
    return ""


def available() -> bool:
    return _switched_on and not _loaded()


def status() -> str:
    """Which path updates take on CPU, in a sentence.

    >>> status().startswith(("compiled", "XLA"))
    True
    """
    if not _switched_on:
        return "XLA: switched off"
    problem = _loaded()
    return f"XLA: {problem}" if problem else f"compiled: {', '.join(RULES)}"


@contextlib.contextmanager
def off() -> Iterator[None]:
    """What is traced inside takes XLA's path: to compare, or to export a program.

    >>> with off():
    ...     status()
    'XLA: switched off'
    """
    global _switched_on
    before, _switched_on = _switched_on, False
    try:
        yield
    finally:
        _switched_on = before
