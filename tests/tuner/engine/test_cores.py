from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.cores import share


@given(st.integers(1, 64), st.integers(1, 16))
def test_shares_are_disjoint_take_every_core_and_differ_by_one_at_most(count: int, parts: int) -> None:
    cores = list(range(count))
    if count < parts:
        with pytest.raises(ValueError, match="cannot be dealt out"):
            share(cores, 0, parts)
        return

    shares = [share(cores, index, parts) for index in range(parts)]

    assert sorted(core for part in shares for core in part) == cores
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores on Linux")
def test_threads_and_children_keep_to_the_share() -> None:
    program = """
import os, threading, subprocess, sys
from tuner.engine.cores import take_share
seen, go = [], threading.Event()
def look():
    go.wait()
    seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=look); thread.start()
mine = take_share(1, 2)
go.set(); thread.join()
child = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], capture_output=True)
assert seen == [mine], (seen, mine)
assert child.stdout.decode().strip() == str(sorted(mine)), child.stdout
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": "."})
