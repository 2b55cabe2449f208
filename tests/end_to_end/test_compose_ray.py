"""The Ray head and the tuner of docker/compose.yaml without their containers: a job with the token, none without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_head import Head, ray_head

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as started:
        yield started


def test_a_command_of_the_tuner_is_a_job_on_the_head(head: Head) -> None:
    done = head.tuner("--version")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tuner 0." in done.stdout


def test_what_the_command_says_of_failure_comes_back(head: Head) -> None:
    done = head.tuner("status", "no-such-study")
    assert done.returncode == 1
    assert "neither a file nor the name of a study" in done.stdout


def test_without_the_token_the_head_refuses(head: Head) -> None:
    refused = head.tuner("--version", token="another")
    assert refused.returncode != 0
    assert "Invalid authentication token" in refused.stderr
    assert "tuner 0." not in refused.stdout
