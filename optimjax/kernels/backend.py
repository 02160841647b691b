"""The build backend: setuptools, with XLA's headers where the extension looks for them.

They come with jaxlib. Without them, or without a compiler, the extension is left out,
and everything runs on XLA alone.
"""

import os
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

HEADERS = Path("build/include")


def _link_headers() -> None:
    try:
        import jaxlib
    except ImportError:
        return
    source = Path(jaxlib.__file__).parent / "include"
    HEADERS.parent.mkdir(exist_ok=True)
    HEADERS.unlink(missing_ok=True)
    os.symlink(source, HEADERS)


def build_wheel(*args: Any, **kwargs: Any) -> str:
    _link_headers()
    return build_meta.build_wheel(*args, **kwargs)


def build_editable(*args: Any, **kwargs: Any) -> str:
    _link_headers()
    return build_meta.build_editable(*args, **kwargs)
