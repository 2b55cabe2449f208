"""The rules of thumb of tuning guides, each tried: docs/rules-of-thumb.md.

Figures of the real CPU engine come from what is recorded (data/cpu_table, data/rules), the others are predicted anew on
the twin of examples/a6000-qwen32b-longdoc.yaml, so that the page can be made again on any machine without an engine.

    PYTHONPATH=. python benchmarks/rules.py                     print every rule with its figures
    PYTHONPATH=. python benchmarks/rules.py --rule 4            one rule only
    PYTHONPATH=. python benchmarks/rules.py --write             write the page
    PYTHONPATH=. python benchmarks/rules.py --record NAME       run the real engine for one of the recordings
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.rules_of_thumb.batching import larger_budget, small_chunks
from benchmarks.rules_of_thumb.graphs import without_graphs
from benchmarks.rules_of_thumb.memory import fp8_cache, model_length, utilisation
from benchmarks.rules_of_thumb.model import Finding
from benchmarks.rules_of_thumb.page import PAGE, page, section
from benchmarks.rules_of_thumb.prefix import shared_prefixes
from benchmarks.rules_of_thumb.record import record, recordings
from benchmarks.rules_of_thumb.sequences import fewer_sequences, longer_context

RULES: tuple[Callable[[], Finding], ...] = (
    larger_budget,
    fewer_sequences,
    longer_context,
    small_chunks,
    shared_prefixes,
    model_length,
    without_graphs,
    utilisation,
    fp8_cache,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--rule", type=int, choices=range(1, len(RULES) + 1))
    parser.add_argument("--record", choices=recordings())
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record, print)
    elif arguments.rule:
        print(section(RULES[arguments.rule - 1]()))
    elif arguments.write:
        PAGE.write_text(page([rule() for rule in RULES]), encoding="utf-8")
    else:
        print(page([rule() for rule in RULES]))


if __name__ == "__main__":
    main()
