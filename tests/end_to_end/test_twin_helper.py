"""The twin in its helper process: predicts before anything was measured, and is gone when it is closed."""

from __future__ import annotations

import math
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tuner.study_file import read
from tuner.study_folder import StudyFolder
from tuner.twin_helper import twin_of

pytestmark = pytest.mark.end_to_end

DOCUMENT = {
    "study": "foreseen",
    "engine": {"args": {"max_model_len": 8192, "enforce_eager": True, "gpu_memory_utilization": 0.2}},
    "workload": {
        "kind": "long_documents",
        "prompt_tokens": {256: 6, 2048: 6},
        "output_tokens": 16,
        "arrivals": {"kind": "poisson", "rate_per_s": 1},
    },
    "space": {
        "max_num_seqs": [1, 16],
        "max_num_batched_tokens": [64, 2048],
        "kv_cache_memory_bytes": [100663296, 1073741824],
    },
    "budget": {"trials": 4},
}


def test_predicts_in_a_process_of_its_own_until_it_is_closed(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreseen.yaml"
    path.write_text(yaml.safe_dump({**DOCUMENT, "model": str(model)}))
    store, notes = tmp_path / "mlruns", list[str]()
    StudyFolder.of("foreseen", store).prepare()
    twin = twin_of(read(path), store, notes.append)
    assert twin is not None
    roomy = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 1073741824}

    one_by_one, together, without_room = twin(
        [{**roomy, "max_num_seqs": 1}, roomy, {**roomy, "kv_cache_memory_bytes": 100663296}], 0
    )
    children = psutil.Process().children()
    twin.close()

    assert one_by_one is not None
    assert together is not None
    assert one_by_one[0] > together[0] > 0
    assert 0 < one_by_one[1] < together[1]
    assert without_room == [math.inf, math.inf]
    assert notes == []
    assert twin([roomy], 0) == [None]
    time.sleep(0.1)
    assert not any("tuner.twin_helper" in " ".join(c.cmdline()) for c in children if c.is_running())
