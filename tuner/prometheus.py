"""Figures of a running study for Prometheus, on 127.0.0.1, computed from the ledger when they are asked for.

The only importer of `prometheus_client`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tuner.ledger import History, TrialState
from tuner.view import Objective, view

if TYPE_CHECKING:
    from prometheus_client import Metric

HOST = "127.0.0.1"


class Exporter:
    """Serves the figures of one study until it is closed.

    Parameters
    ----------
    read:
        Returns the history as it is now; called for each scrape, on the server's thread.

    Raises
    ------
    OSError
        When the port cannot be had.
    """

    def __init__(self, port: int, study: str, read: Callable[[], History], objectives: Sequence[Objective]) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=True)
        registry.register(_Figures(study, read, objectives))
        self._server, self._thread = start_http_server(port, addr=HOST, registry=registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _Figures:
    """What Prometheus calls a collector."""

    def __init__(self, study: str, read: Callable[[], History], objectives: Sequence[Objective]) -> None:
        self._study = study
        self._read = read
        self._objectives = tuple(objectives)

    def describe(self) -> list[Metric]:
        """Nothing is known before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Compute every figure anew."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        history = self._read()
        study = view(history, self._objectives)
        states = Counter(t.state for t in history.trials)
        trials = GaugeMetricFamily("tuner_trials", "Trials by state", labels=["study", "state"])
        for state in TrialState:
            trials.add_metric([self._study, state.value], states.get(state, 0))
        yield trials
        failures = GaugeMetricFamily("tuner_failures", "Trials that failed, by kind", labels=["study", "kind"])
        for kind, count in sorted(Counter(t.failure.kind for t in history.finished if t.failure).items()):
            failures.add_metric([self._study, kind.value], count)
        yield failures
        front = GaugeMetricFamily("tuner_front_size", "Configurations on the front", labels=["study"])
        front.add_metric([self._study], len(study.front))
        yield front
        volume = GaugeMetricFamily(
            "tuner_hypervolume", "Hypervolume of the front; vLLM's defaults alone are 1", labels=["study"]
        )
        if study.hypervolume is not None:
            volume.add_metric([self._study], study.hypervolume)
        yield volume
        seconds = CounterMetricFamily("tuner_engine_seconds", "Seconds that engines were occupied", labels=["study"])
        seconds.add_metric([self._study], sum(t.engine_s for t in history.finished))
        yield seconds
        last = GaugeMetricFamily("tuner_last_trial_end_seconds", "Unix time of the last trial's end", labels=["study"])
        ends = [t.finished_at for t in history.finished if t.finished_at is not None]
        if ends:
            last.add_metric([self._study], max(ends))
        yield last
