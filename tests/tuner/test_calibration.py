from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from objectives.measurement import Measurement, SpeedProbe
from tuner import artifacts
from tuner.calibration import FILE, MOST_TRIALS, Calibration, Calibrator, usable
from tuner.calibration_report import calibrate
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.coefficient_sets import CoefficientSets
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.steptime import Coefficients
from tuner.errors import StoreError, StudyFileError
from tuner.judge import judge
from tuner.ledger import History, StudyHeader, TrialLine, TrialRecord, TrialState
from tuner.opening import base_config, build_workload
from tuner.plan import plan
from tuner.study_file import read
from tuner.study_folder import StudyFolder
from tuner.workload.model import Workload

SMOLLM2 = Path(__file__).parents[1] / "data" / "models" / "smollm2-135m"

STUDY = """
study: measured
model: {model}
engine: {{args: {{max_model_len: 1024, block_size: 32, kv_cache_memory_bytes: 268435456}}}}
workload:
  kind: long_documents
  requests: 16
  prompt_tokens: [128, 512]
  output_tokens: 80
  arrivals: {{kind: poisson, rate_per_s: 4}}
space:
  max_num_seqs: [1, 4, 16]
  max_num_batched_tokens: {{low: 64, high: 1024, log: true}}
budget: {{trials: 5}}
"""

MACHINE = Coefficients({"step": 2.0, "linear": 0.8, "token": 2.0, "decode_attention": 1.5, "request": 1.4})
"""What the machine of these tests is like."""


class Measured:
    """A study on disk whose trials a machine like `MACHINE` measured."""

    def __init__(self, root: Path) -> None:
        self.store = root / "mlruns"
        self.path = root / "measured.yaml"
        self.path.write_text(STUDY.format(model=SMOLLM2))
        self.file = read(self.path)
        self.folder = StudyFolder.of("measured", self.store)
        self.workload = build_workload(self.file, self.store).workload
        self.folder.prepare()
        self.folder.ledger.append(StudyHeader("measured", "", "", "", "0.32.0", "0", 0.0))

    @property
    def history(self) -> History:
        return self.folder.ledger.history()

    def calibrator(self) -> Calibrator:
        return Calibrator(self.folder, self.workload, TwinEngine(find_device("cpu"), SMOLLM2))

    def add(self, number: int, *, device: str = "cpu", predicted: bool = False, **args: object) -> TrialRecord:
        """Measure a configuration and write it down."""
        config = base_config(self.file).with_args(args)
        measurement = _measured(config, self.workload, device, predicted)
        artifacts.save(measurement, self.folder.trial(number))
        record = TrialRecord(
            number=number,
            state=TrialState.COMPLETE,
            source="design" if number else "reference",
            params=dict(args),
            config=config,
            started_at=float(number),
            finished_at=float(number) + 0.5,
            score=judge(self.file, measurement, self.workload, None, {}),
            engine=measurement.engine,
            predicted=predicted,
        )
        self.folder.ledger.append(TrialLine(record))
        return record


def _measured(config: EngineConfig, workload: Workload, device: str, predicted: bool) -> Measurement:
    engine = TwinEngine(find_device("cpu"), SMOLLM2, coefficients=MACHINE)
    outcome = engine.run(config, workload, MeasurePlan(), lambda _: None)
    assert isinstance(outcome, Measurement), outcome
    facts = dataclasses.replace(outcome.engine, engine="vllm", device_name=device)
    probe = engine.probe(config)  # of a machine, which cuts the probe's prompt as the configuration says
    assert isinstance(probe, SpeedProbe)
    return dataclasses.replace(outcome, engine=facts, predicted=predicted, speed_before=probe, speed_after=probe)


@pytest.fixture
def empty(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    made = Measured(tmp_path_factory.mktemp("measured"))
    for number, args in enumerate(
        (
            {},
            {"max_num_seqs": 1},
            {"max_num_seqs": 16, "max_num_batched_tokens": 64},
            {"max_num_seqs": 4, "max_num_batched_tokens": 200},
        )
    ):
        made.add(number, **args)
    return made


def test_a_study_calibrates_its_twin_to_the_machine_that_measured_it(study: Measured) -> None:
    config = base_config(study.file).with_args({"max_num_seqs": 16, "max_num_batched_tokens": 128})
    truth = TwinEngine(find_device("cpu"), SMOLLM2, coefficients=MACHINE)
    found = study.calibrator().engine(study.history)

    durations = [e.run(config, study.workload, MeasurePlan(), lambda _: None) for e in (truth, found)]

    assert all(isinstance(m, Measurement) for m in durations)
    expected, seen = (sum(m.duration_s) for m in durations if isinstance(m, Measurement))
    assert seen == pytest.approx(expected, rel=0.03)


def test_without_a_measured_trial_the_twin_stays_as_it_was(empty: Measured) -> None:
    empty.add(0, predicted=True)
    empty.add(1, device="NVIDIA H200")
    empty.add(2, device="a device of another world")
    calibrator = empty.calibrator()

    assert calibrator.of(empty.history) is None
    assert calibrator.engine(empty.history) is calibrator.twin


def test_a_calibration_is_made_once_for_the_same_trials_and_anew_for_others(empty: Measured) -> None:
    empty.add(0)
    calibrator = empty.calibrator()
    first = calibrator.of(empty.history)

    assert calibrator.of(empty.history) is first
    empty.add(1, max_num_seqs=1)
    second = calibrator.of(empty.history)
    assert second is not None
    assert second.trials == (0, 1)


def test_a_kept_calibration_is_read_back_while_it_holds(empty: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    empty.add(0)
    made = empty.calibrator()
    made.keep(empty.history)
    monkeypatch.setattr("tuner.calibration.follow", lambda *_: pytest.fail("replayed again"))

    assert empty.calibrator().of(empty.history) == made.of(empty.history)


@pytest.mark.parametrize("text", ["", "{}", '{"basis": 1}', "[]"])
def test_a_file_that_cannot_be_read_is_made_again(empty: Measured, text: str) -> None:
    empty.add(0)
    (empty.folder.path / FILE).write_text(text)

    assert empty.calibrator().of(empty.history) is not None


def test_trials_without_usable_tables_are_left_out_with_their_reason(empty: Measured) -> None:
    for number in range(3):
        empty.add(number, max_num_seqs=1 + number)
    (empty.folder.trial(0) / "steps.parquet").unlink()
    longer = dataclasses.replace(artifacts.load(empty.folder.trial(1)), steps=())
    artifacts.save(longer, empty.folder.trial(1))

    found = empty.calibrator().of(empty.history)

    assert found is not None
    assert found.trials == (2,)
    assert "tables cannot be read" in found.left_out[0]
    assert "no step rows" in found.left_out[1]


def test_trials_of_another_workload_are_left_out(study: Measured) -> None:
    short = dataclasses.replace(study.workload, requests=study.workload.requests[:6])
    calibrator = Calibrator(study.folder, short, TwinEngine(find_device("cpu"), SMOLLM2))

    assert calibrator.of(study.history) is None
    assert "workload" in str(calibrator.followed(study.history.trials[0]))


def test_of_many_trials_some_are_used_the_first_and_the_latest_among_them(empty: Measured) -> None:
    one = empty.add(0)
    trials = tuple(
        dataclasses.replace(one, number=n, config=one.config.with_args({"max_num_seqs": n + 1})) for n in range(50)
    )
    again = dataclasses.replace(one, number=50, config=trials[0].config)

    chosen = [t.number for t in usable(History(None, (*trials, again), (), ()), empty.calibrator().twin)]

    assert len(chosen) == MOST_TRIALS
    assert (chosen[0], chosen[-1]) == (1, 50)


def test_sets_of_coefficients_survive_json() -> None:
    sets = CoefficientSets(MACHINE, {"a/CPU/default": Coefficients({"step": 3.0}, (0.9, 1.1), ("step",), "k", 7)})
    written = Calibration(sets, (0, 3), {1: "why"})

    assert Calibration.from_document(json.loads(json.dumps(written.document()))) == written
    with pytest.raises(StoreError, match="calibrate again"):
        CoefficientSets.from_document({"shared": {}})


# tuner calibrate ----------------------------------------------------------------------------------------------------


def test_calibrate_says_what_was_fitted_and_how_well_it_predicts(study: Measured) -> None:
    result = calibrate(str(study.path), lambda _: None, store=study.store)
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    text = "\n".join(result.lines())

    assert document["trials"] == [0, 1, 2, 3]
    assert document["check"]["comparable"] == 4
    for figures in document["check"]["objectives"].values():
        assert figures["median_error"] < 0.05
        assert figures["spearman"] > 0.7
    assert "communication" in text
    assert "the catalogue's" in text
    assert json.loads((study.folder.path / FILE).read_text())["trials"] == [0, 1, 2, 3]


def test_one_trial_is_enough_to_calibrate_and_too_few_to_say_how_well(empty: Measured) -> None:
    empty.add(0)

    result = calibrate(str(empty.path), lambda _: None, store=empty.store)

    assert result.compared == ()
    assert any("takes a second trial" in line for line in result.lines())


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda _: None, r"no trial of study measured was measured on CPU yet; `tuner run`"),
        (lambda s: s.add(0, predicted=True), r"predicted ones do not count"),
        (lambda s: (s.add(0), (s.folder.trial(0) / "facts.json").unlink()), r"can be used: .*cannot be read"),
    ],
    ids=["nothing", "predicted", "no tables"],
)
def test_why_nothing_can_be_calibrated_is_said_in_a_sentence(
    empty: Measured, prepare: Callable[[Measured], object], sentence: str
) -> None:
    prepare(empty)

    with pytest.raises(StudyFileError, match=sentence):
        calibrate(str(empty.path), lambda _: None, store=empty.store)


def test_a_plan_of_a_study_that_has_begun_predicts_with_its_own_trials(study: Measured) -> None:
    document = plan(str(study.path), lambda _: None, limit_s=0.5, store=study.store).document()

    assert document["twin"]["calibrated"] is True
    assert document["twin"]["calibrated_on"] == [0, 1, 2, 3]
