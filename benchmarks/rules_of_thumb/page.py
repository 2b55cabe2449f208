"""docs/rules-of-thumb.md: every finding as a reader of tuning guides wants it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.rules_of_thumb.model import Finding, Outcome, Tried, Verdict, verdict

PAGE = Path(__file__).parents[2] / "docs" / "rules-of-thumb.md"
MOST_NAMED = 8
"""Situations that are named one by one; of more, only the number."""
MOST_ROWS = 20
"""A longer table is folded."""

HEAD = """\
# Rules of thumb, tried

Made by `PYTHONPATH=. python benchmarks/rules.py --write`; edit nothing here by hand.

Widely copied tuning guides for four RTX A6000 and a 32B model give these rules, mostly without the load or the workload
that they were seen under. Each is tried here where it can be: **measured** on vLLM's real CPU engine (SmolLM2-135M, two
cores) and in published measurements of others, **predicted** on the twin of 4×A6000 with DeepSeek-R1-Distill-Qwen-32B
(vLLM's own scheduler on a virtual clock, not calibrated for this card: trust directions and ratios more than
milliseconds). A load of 100% is the rate at which vLLM's defaults work off all requests when they are there at once.

A verdict is computed from the figures. **Holds**: every part of the rule was as said in every situation that was tried;
**does not hold**: in none of them; **depends**: in some. A study of your own settles it for your workload: `tuner run`.
"""


def page(findings: Sequence[Finding]) -> str:
    """Return the whole page."""
    summary = table(
        ("", "rule", "verdict", "as said in", "it turns on"),
        [
            (
                str(f.number),
                f.rule,
                f"**{f.verdict}**",
                "; ".join(f"{part}: {held} of {of}" for part, (held, of) in f.parts().items()),
                f.turns_on,
            )
            for f in findings
        ],
    )
    return "\n".join([HEAD, summary, *(section(finding) for finding in findings)])


def section(finding: Finding) -> str:
    """Return one rule with its figures."""
    lines = [
        f"\n## Rule {finding.number}: {finding.verdict}\n",
        f"> {finding.rule}\n",
        f"{finding.why}\n",
        f"As said means: {finding.criterion}",
    ]
    return "\n".join([*lines, *(place(tried) for tried in finding.tried)]) + "\n"


def place(tried: Tried) -> str:
    """Return one place where a rule was tried."""
    kind = "predicted" if tried.predicted else "measured"
    lines = [f"\n### {tried.where[0].upper()}{tried.where[1:]} ({kind})\n", f"{tried.how}\n"]
    shown = table(tried.header, tried.rows) if tried.rows else "Nothing is recorded yet that this could be read from.\n"
    if len(tried.rows) > MOST_ROWS:
        shown = f"<details><summary>All {len(tried.rows)} rows</summary>\n\n{shown}\n</details>\n"
    lines.append(shown)
    lines += [f"- {note}" for note in tried.notes]
    if tried.outcomes:
        lines.append(f"- {said(tried.outcomes)}")
    return "\n".join(lines)


def said(outcomes: Sequence[Outcome]) -> str:
    """Say in which situations a rule was as said."""
    every = list(dict.fromkeys(o.situation for o in outcomes))
    held = [s for s in every if verdict([o for o in outcomes if o.situation == s]) is Verdict.HOLDS]
    text = f"All of the rule as said in {len(held)} of {len(every)} situations"
    if 0 < len(held) < len(every) and len(held) <= MOST_NAMED:
        text += f": {'; '.join(held)}"
    parts = dict.fromkeys(o.part for o in outcomes)
    if len(parts) > 1:
        counts = [(p, [o.as_said for o in outcomes if o.part == p]) for p in parts]
        text += f" ({', '.join(f'{p} in {sum(yes)} of {len(yes)}' for p, yes in counts)})"
    return text + "."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [_row(header), "|" + "---|" * len(header), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
