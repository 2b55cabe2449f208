"""Two real engines at once on one machine: cores of their own, trials side by side, nothing left behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import Tuner, engine_processes, small_study, wait_until

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]


def cores(log: str) -> set[int]:
    """Cores to which vLLM says that it bound its threads."""
    lists = re.findall(r"local_rank=0, core ids=\[([\d, ]+)\]", log)
    assert lists, log[-2000:]
    return {int(core) for core in lists[-1].split(",")}


def test_two_engines_work_side_by_side_on_cores_of_their_own(tuner: Tuner, model: Path) -> None:
    study = small_study(
        tuner.folder, model, resources={"engines": 2}, space={"max_num_seqs": [1, 2, 4, 8, 16]}, search={"seed": 1}
    )

    done = tuner.run("run", str(study))

    assert done.returncode == 0, done.stderr[-3000:]
    records = {record["number"]: record for record in tuner.finished("small")}
    assert [record["state"] for record in records.values()] == ["complete"] * 3
    assert records[0]["neighbours"] == 0
    beside = [number for number, record in records.items() if record["neighbours"] == 1]
    assert len(beside) == 2
    first, second = (cores(tuner.engine_log("small", number)) for number in beside)
    assert not first & second
    wait_until("every process is gone", lambda: not engine_processes(tuner.folder), 30)
