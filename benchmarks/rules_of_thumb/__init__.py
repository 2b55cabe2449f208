"""Rules of thumb of tuning guides, each tried: on the real CPU engine, on the twin, against published measurements.

`model` says what a finding is and how figures become a verdict; a module a family of rules collects figures; `page`
writes docs/rules-of-thumb.md. Run it with benchmarks/rules.py.
"""
