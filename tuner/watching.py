"""What watches a run beside its display: the structured log, the figures for Prometheus, and who is told at the end.

Whatever of this fails is said in a sentence; the study goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tuner.errors import StoreError, StudyBusyError, StudyStoppedError, TunerError, UsageError
from tuner.journal import Journal
from tuner.judge import objectives_of
from tuner.ledger import History, TrialRecord
from tuner.log_cap import cap_logs
from tuner.night import Deadline
from tuner.notify import notify
from tuner.proposal import Proposal
from tuner.run_plan import limits_of
from tuner.status import note_run, summary
from tuner.study import Ending, Listener
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.view import view


@dataclass(slots=True)
class Watch:
    """A `Listener` that passes on what it hears to the display and to the log, and tidies up behind each trial."""

    file: StudyFile
    folder: StudyFolder
    display: Listener
    journal: Journal
    ending: Ending | None = None

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Pass on that a trial begins."""
        self.journal.began(proposal, of_trials, ends_at)
        self.display.began(proposal, of_trials, ends_at)

    def progressed(self, number: int, text: str) -> None:
        """Pass on that a trial entered a new stage."""
        self.journal.progressed(number, text)
        self.display.progressed(number, text)

    def finished(self, record: TrialRecord, history: History) -> None:
        """Pass on that a trial is over, and cut its logs to size."""
        self.journal.finished(record, history)
        self.display.finished(record, history)
        try:
            cap_logs(self.folder.trial(record.number), record.failure)
        except OSError as error:
            self.noted(f"trial {record.number}: its log is longer than it may be and cannot be cut ({error.strerror})")

    def noted(self, text: str) -> None:
        """Pass on what concerns the study as a whole."""
        self.journal.noted(text)
        self.display.noted(text)


@contextmanager
def watched(file: StudyFile, display: Listener) -> Iterator[Watch]:
    """Watch one run from before it holds the study to after everything of it is closed; who runs it sets the ending."""
    folder = StudyFolder.of(file.spec.study)
    watch = Watch(file, folder, display, Journal(folder.path, file.spec.engine.env))
    began_s = time.monotonic()
    try:
        yield watch
    except (UsageError, StudyBusyError):
        raise  # nothing was begun
    except TunerError as error:
        code = "machine" if isinstance(error, StudyStoppedError) else "failed"
        _tell(watch, Ending(code, str(error)), began_s)
        raise
    except KeyboardInterrupt:
        _tell(watch, Ending("stopped", "stopped; `tuner run` goes on with it where it was"), began_s)
        raise
    else:
        if watch.ending is not None:
            _tell(watch, watch.ending, began_s)


@contextmanager
def served(watch: Watch, trials: int | None, deadline: Deadline | None) -> Iterator[None]:
    """Say that the run begins, and serve its figures while it lasts."""
    note_run(watch.folder, limits_of(watch.file, trials), deadline)
    left_s = None if deadline is None else round(deadline.left_s(), 1)
    watch.journal.write("run_begun", trials=limits_of(watch.file, trials).trials, left_s=left_s)
    with ExitStack() as stack:
        port = watch.file.spec.prometheus.port
        if port is not None:
            from tuner.prometheus import HOST, Exporter

            try:
                exporter = Exporter(port, watch.file.spec.study, watch.folder.ledger.history, objectives_of(watch.file))
            except OSError as error:
                watch.noted(f"prometheus.port: {HOST}:{port} cannot be had ({error.strerror}); nothing is served there")
            else:
                stack.callback(exporter.close)
        yield


def _tell(watch: Watch, ending: Ending, began_s: float) -> None:
    seconds = time.monotonic() - began_s
    watch.journal.write("run_ended", ending=ending.code, text=ending.text, duration_s=round(seconds, 1))
    if watch.file.spec.notify.command or watch.file.spec.notify.url:
        try:
            history = watch.folder.ledger.history()
        except StoreError as error:
            watch.noted(f"nobody is notified: {error}")
            return
        study = view(history, objectives_of(watch.file))
        document = summary(watch.file.spec.study, study, code=ending.code, text=ending.text, hours=seconds / 3600)
        notify(watch.file.spec.notify, document, watch.file.spec.engine.env, watch.noted)
