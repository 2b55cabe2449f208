import pickle

from tuner.engine.load import LoadAbortedError, LoadResult
from tuner.errors import StudyFileError


def test_a_study_files_problems_reach_another_process_whole() -> None:
    error = StudyFileError("study.yaml", [("engine.base", "is no mapping"), ("", "two lines\nof text")])
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.path, copy.problems, str(copy)) == (error.path, error.problems, str(error))


def test_what_was_seen_until_an_engine_died_reaches_another_process() -> None:
    partial = LoadResult(records=(), started_s=3.0, duration_s=1.0, lateness_s=(), held_back_s=(), unsent=4)
    copy = pickle.loads(pickle.dumps(LoadAbortedError("the engine died", partial)))
    assert (copy.partial, str(copy)) == (partial, "the engine died")
