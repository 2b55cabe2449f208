"""How a study is run: propose, gate, run, score, record, show, export."""
