"""Telling somebody that a study is over: a command, or a webhook, gets its summary as JSON.

Nothing waits for either for long, and nothing that either does can change how the study ended.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from tuner.secrets import MASKED, mask, mask_tree, secret_values
from tuner.spec import Notify

TRIES = 3
PAUSE_S = 2.0
"""Before the second try; twice that before the third."""
ENDING_S = 1.0
"""What it takes to end a command whose time is up."""


def notify(spec: Notify, document: Mapping[str, Any], env: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Send a study's summary where the study file says, and return at the latest when all tries have timed out.

    Parameters
    ----------
    env:
        Environment variables of the study file: values of secrets among them are masked.
    tell:
        Called with one sentence where nothing arrived.
    """
    secrets = secret_values() + secret_values(env)
    body = json.dumps(mask_tree(document, secrets), allow_nan=False, default=str).encode()
    ways: list[tuple[str, Callable[[], None]]] = []
    if spec.command:
        ways.append((f"the command {spec.command[0]}", lambda: _run(spec, body)))
    if spec.url is not None:
        url = spec.url
        ways.append(("the webhook", lambda: _post(url, body, spec.timeout_s)))
    threads = [
        threading.Thread(target=_try, args=(what, send, spec, secrets, tell), daemon=True, name="notify")
        for what, send in ways
    ]
    for thread in threads:
        thread.start()
    limit_s = time.monotonic() + TRIES * (spec.timeout_s + ENDING_S) + 4 * PAUSE_S
    for thread in threads:
        thread.join(max(0.0, limit_s - time.monotonic()))


def _try(
    what: str, send: Callable[[], None], spec: Notify, secrets: tuple[str, ...], tell: Callable[[str], None]
) -> None:
    for attempt in range(TRIES):
        try:
            send()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if attempt + 1 == TRIES:
                cause = mask(" ".join(str(error).split()), secrets)[:200]
                if spec.url is not None:
                    cause = cause.replace(spec.url, MASKED)
                tell(f"notify: {what} did not take the study's summary ({cause}); the study itself is not touched")
            else:
                time.sleep(PAUSE_S * (attempt + 1))
        else:
            return


def _run(spec: Notify, body: bytes) -> None:
    """Run the command without a shell, the summary on its standard input; it is killed when its time is up."""
    done = subprocess.run(
        list(spec.command), input=body, timeout=spec.timeout_s, capture_output=True, check=False, start_new_session=True
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"it ended with status {done.returncode}" + (f": {said[-1]}" if said else ""))


def _post(url: str, body: bytes, timeout_s: float) -> None:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read(1024)
