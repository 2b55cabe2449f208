"""How a study is run: propose, gate, run, score, record, show, export."""

__version__ = "0.1.0"
