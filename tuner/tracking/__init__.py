"""MLflow as the place where a study is read: runs, figures and notes, brought up to date from the ledger.

The ledger is written first and MLflow follows, so that MLflow may be down, slow, locked or gone without harm. `content`
says what a trial looks like in MLflow (pure), `series` and `evidence` prepare its charts and files, `summary` and
`views` what the whole study looks like, `store` talks to MLflow (the only importer of it), `tracker` brings an
experiment up to date, `background` does so beside a running study, `server` starts the UI.
"""

from tuner.tracking.background import BackgroundTracker
from tuner.tracking.server import UiServer, experiment_url, ui_command
from tuner.tracking.store import default_artifact_root, default_uri
from tuner.tracking.tracker import SyncResult, Tracker

__all__ = [
    "BackgroundTracker",
    "SyncResult",
    "Tracker",
    "UiServer",
    "default_artifact_root",
    "default_uri",
    "experiment_url",
    "ui_command",
]
