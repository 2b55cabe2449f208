"""vLLM's own values of its engine arguments, read from the vLLM that is installed."""

from __future__ import annotations

import dataclasses
import os
from typing import Any


def engine_defaults() -> dict[str, Any]:
    """Name -> default of every engine argument whose default is plain data.

    Arguments whose default is an object of vLLM's (such as `compilation_config`) are not here: a study can only set
    them to something else.

    Raises
    ------
    ImportError
        When vLLM is not installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # what vLLM says of this machine at import is no news here
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
