"""Two ready-made views of MLflow's own UI: the table of all trials, and its scatter and parallel plots of the front.

The UI keeps a shared view as JSON in a tag of the experiment and opens it by its key. The form is the UI's own (tried
with MLflow 3.17); a UI that does not know it opens on its defaults and says so.
"""

from __future__ import annotations

import json
from typing import Any

from tuner.tracking.content import metric_key
from tuner.view import StudyView

TRIALS, FRONT = "trials", "front"
"""Keys of the views."""
MOST_PARAMETERS = 8
"""Columns of the table that parameters may take."""


def view_tags(study: StudyView) -> dict[str, str]:
    """Tags of the experiment that hold the views."""
    views = {TRIALS: _trials(study), FRONT: _front(study)}
    return {f"mlflow.sharedViewState.{key}": json.dumps(state) for key, state in views.items()}


def view_link(experiment_id: str, key: str) -> str:
    """Address of a view within the UI, whatever host it is served from."""
    charts = "&compareRunsMode=CHART" if key == FRONT else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{charts}&viewStateShareKey={key}"


def _trials(study: StudyView) -> dict[str, Any]:
    return {
        "searchFilter": "",
        # The oldest first: the summary and the reference stand at the top.
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": [
            *(f"metrics.`{name}`" for name in _metrics(study)),
            *(f"tags.`{name}`" for name in ("state", "pareto", "knee", "failure.kind")),
            *(f"params.`{name}`" for name in _parameters(study)),
        ],
    }


def _front(study: StudyView) -> dict[str, Any]:
    chart = {"runsCountToCompare": 500, "metricSectionId": FRONT, "deleted": False, "isGenerated": False}
    x, *others = _metrics(study)
    scatters = [
        {**chart, "uuid": f"scatter-{y}", "type": "SCATTER"}
        | {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
        for y in others
    ]
    parallel = {**chart, "uuid": "parallel", "type": "PARALLEL"}
    parallel |= {"selectedMetrics": [x, *others], "selectedParams": _parameters(study)}
    section = {"uuid": FRONT, "name": "Front", "display": True, "isReordered": False, "deleted": False}
    return {
        **_trials(study),
        "searchFilter": "tags.pareto = 'true'",
        "runsHiddenMode": "SHOWALL",
        "isAccordionReordered": True,
        "compareRunSections": [{**section, "isGenerated": False}],
        "compareRunCharts": [*scatters, parallel],
    }


def _metrics(study: StudyView) -> list[str]:
    return [metric_key(o.name) for o in study.objectives]


def _parameters(study: StudyView) -> list[str]:
    names = dict.fromkeys(name for trial in study.trials for name in trial.params)
    return [metric_key(name) for name in names][:MOST_PARAMETERS]
