"""vLLM's own values of its engine arguments, read from the vLLM that is installed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

_LEVEL = "VLLM_LOGGING_LEVEL"


def engine_defaults() -> dict[str, Any]:
    """Name -> default of every engine argument whose default is plain data.

    Arguments whose default is an object of vLLM's (such as `compilation_config`) are not here: a study can only set
    them to something else.

    Raises
    ------
    ImportError
        When vLLM is not installed.
    """
    with _silent():
        from vllm.engine.arg_utils import AsyncEngineArgs

    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            continue
        if value is None or isinstance(value, bool | int | float | str | list | dict):
            defaults[field.name] = value
    return defaults


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep to itself what vLLM says of this machine when it is imported, unless somebody asked to hear it.

    Python itself prints warnings of a logger that has no handler yet: vLLM's, until its first use. The variable must
    not stay: an engine that is started later would inherit it, and its log would not show how far it came.
    """
    if _LEVEL in os.environ:
        yield
        return
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ[_LEVEL] = "ERROR"
    try:
        yield
    finally:
        del os.environ[_LEVEL]
