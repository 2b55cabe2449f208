"""Rules 6, 8 and 9: what sets the size of the KV pool, and what the pool sets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.rules_of_thumb import a6000, cpu, published
from benchmarks.rules_of_thumb.a6000 import Mix, Point, point
from benchmarks.rules_of_thumb.model import Change, Direction, Finding, Outcome, Tried, ms, percent, within
from benchmarks.rules_of_thumb.record import BURST, BURST_OUTPUT_TOKENS, BURST_PROMPT_TOKENS, recorded

NOISE = 0.05
BLOCK_TOKENS = 16

LENGTHS = (4096, 33_792, 131_072)
SETS = "concurrency follows max_model_len"


def model_length() -> Finding:
    """Rule 6."""
    return Finding(
        number=6,
        rule="`max_model_len` sets the concurrency: halve it, and twice as many requests run.",
        criterion=f"With nothing else changed, the most requests that run at once change by more than {NOISE:.0%}.",
        tried=(_length_twin(), _length_cpu(), _length_logs()),
        turns_on="nothing found: requests take blocks as they grow, whatever they might have grown to",
        why=(
            "The pool is what memory leaves, and requests take blocks of it as they grow. What changes with "
            "`max_model_len` is the line `Maximum concurrency` at start-up, which is the pool divided by it, and "
            "whether the engine starts at all: the pool has to hold one request of that length."
        ),
    )


def judge_length(situation: str, before: float, after: float) -> Outcome:
    """Hold the most requests that ran under two limits against rule 6."""
    return Outcome(situation, SETS, Change.of([before], [after]).direction(NOISE) is not Direction.SAME)


SMALL_POOL = 0.45
"""A utilisation that leaves so little for the pool that it is what limits the batch."""


def _length_twin() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for use in (SMALL_POOL, 0.9):
        found: dict[int, Point] = {}
        for length in LENGTHS:
            args = {"max_model_len": length, "gpu_memory_utilization": use}
            tokens = a6000.predict_memory(**args).kv_tokens
            said = f"{tokens / length:.1f}"
            if tokens < length:
                rows.append((f"{use}", str(length), str(tokens), said, "does not start", ""))
                continue
            found[length] = a6000.succeeded(a6000.play(a6000.at_once(a6000.CHAT), **args))
            got = found[length]
            rows.append((f"{use}", str(length), str(tokens), said, str(got.most_running), ms(got.ttft_mean_s)))
        first, *others = found
        outcomes += [
            judge_length(f"utilisation {use}, {first} → {n}", found[first].most_running, found[n].most_running)
            for n in others
        ]
    return Tried(
        where=a6000.WHERE,
        predicted=True,
        how=f"Predicted: {a6000.CHAT.text}, all at once. The pool is the memory model's.",
        header=("utilisation", "max_model_len", "pool, tokens", "pool / max_model_len", "most running", "TTFT mean"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )


def _length_cpu() -> Tried:
    found = {
        length: measured for length in (1024, 8192) if (measured := recorded(f"length-{length}", "burst")) is not None
    }
    points = {length: point(measured) for length, measured in found.items()}
    rows = tuple(
        (str(n), str(p.kv_tokens), f"{p.kv_tokens / n:.1f}", str(p.most_running), ms(p.ttft_mean_s), ms(p.tpot_mean_s))
        for n, p in points.items()
    )
    outcomes: tuple[Outcome, ...] = ()
    if len(points) == 2:
        outcomes = (judge_length("1024 → 8192", points[1024].most_running, points[8192].most_running),)
    return Tried(
        where=cpu.WHERE,
        predicted=False,
        how=(
            f"Measured, one run each, SmolLM2-135M: {BURST} requests of {BURST_PROMPT_TOKENS} prompt and "
            f"{BURST_OUTPUT_TOKENS} output tokens at once, a pool of 192 MiB, `max_num_seqs` 64, budget 2048."
        ),
        header=("max_model_len", "pool, tokens", "pool / max_model_len", "most running", "TTFT mean", "TPOT mean"),
        rows=rows,
        outcomes=outcomes,
    )


SAME_BUT_LENGTH = ("m104", "m106", "m098", "m110")


def _length_logs() -> Tried:
    logs = published.memory(*SAME_BUT_LENGTH)
    first = logs[0]
    return Tried(
        where="published start-up logs, H100",
        predicted=False,
        how=(
            f"{first['model']} on one {first['gpu']}, vLLM {first['vllm_version']}; only the length differs "
            f"({first['source']})."
        ),
        header=("max_model_len", "pool, tokens"),
        rows=tuple((str(log["max_model_len"]), str(log["kv_cache_tokens"])) for log in logs),
        outcomes=(),
        notes=("The pool, from which requests take their blocks, is the same at every length.",),
    )


SAID_BLOCKS = {0.7: 3000, 0.9: 4500, 0.95: 5000}
COUNTS, SHAPE = "number of blocks", "growth by 1.5 and 1.11"
BLOCKS_NEAR, SHAPE_NEAR = 0.2, 0.1


def utilisation() -> Finding:
    """Rule 8."""
    return Finding(
        number=8,
        rule="`gpu_memory_utilization` 0.7 → 0.9 → 0.95 gives 3000 → 4500 → 5000 blocks.",
        criterion=(
            f"The predicted number of blocks is within {BLOCKS_NEAR:.0%} of each figure; apart from that, the two "
            f"growth factors within {SHAPE_NEAR:.0%}."
        ),
        tried=(_blocks_model(), _blocks_logs()),
        turns_on="model, tensor parallelism, card and block size for the number; what is not KV cache for the growth",
        why=(
            "Blocks = (utilisation × total − what is not KV cache) / bytes of a block: a straight line, whose slope "
            "and zero are another machine's for another model, tensor parallelism, card, cache type or block size. "
            "No number of blocks carries over. Raising the utilisation gains the more, relatively, the less the "
            "model leaves."
        ),
    )


def judge_blocks(situation: str, blocks: dict[float, float]) -> tuple[Outcome, Outcome]:
    """Hold blocks by utilisation against rule 8."""
    near = all(within(blocks[u], said, BLOCKS_NEAR) for u, said in SAID_BLOCKS.items())
    low, middle, high = sorted(SAID_BLOCKS)
    grows = all(
        within(blocks[b] / blocks[a], SAID_BLOCKS[b] / SAID_BLOCKS[a], SHAPE_NEAR)
        for a, b in ((low, middle), (middle, high))
    )
    return Outcome(situation, COUNTS, near), Outcome(situation, SHAPE, grows)


CARDS: dict[str, dict[str, Any]] = {
    "4 cards": {},
    "4 cards, blocks of 32": {"block_size": 32},
    "4 cards, fp8 cache": {"kv_cache_dtype": "fp8"},
    "4 cards, max_num_seqs 1024": {"max_num_seqs": 1024},
    "8 cards": {"tensor_parallel_size": 8},
}


def _blocks_model() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for name, args in CARDS.items():
        size = int(args.get("block_size", BLOCK_TOKENS))
        blocks = {u: a6000.predict_memory(gpu_memory_utilization=u, **args).kv_tokens / size for u in SAID_BLOCKS}
        low, middle, high = sorted(SAID_BLOCKS)
        growth = f"{blocks[middle] / blocks[low]:.2f}, {blocks[high] / blocks[middle]:.2f}"
        rows.append((name, *(f"{blocks[u]:.0f}" for u in sorted(SAID_BLOCKS)), growth))
        outcomes += judge_blocks(name, blocks)
    return Tried(
        where="memory model of 4×A6000",
        predicted=True,
        how=(
            "Predicted by the memory model (32B, bfloat16, cards of 47.5 GiB, blocks of 16 tokens unless it says "
            "otherwise), which meets published start-up logs with a median error of 0.007 GiB (benchmarks/README.md)."
        ),
        header=("configuration", *(f"utilisation {u}" for u in sorted(SAID_BLOCKS)), "growth"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
        notes=(_implied(),),
    )


def _implied() -> str:
    """Say what the rule's own figures mean: a line through the first two."""
    (u0, b0), (u1, b1), (u2, _) = sorted(SAID_BLOCKS.items())
    slope = (b1 - b0) / (u1 - u0)
    fixed = u0 - b0 / slope
    return (
        f"The rule's first two figures lie on a line that is zero at a utilisation of {fixed:.2f} and gives "
        f"{slope * (u2 - fixed):.0f} blocks at {u2}: the figures of one machine on which everything but the cache "
        f"takes {fixed:.0%} of the card."
    )


SAME_BUT_UTILISATION = ("m085", "m086")


def _blocks_logs() -> Tried:
    logs = published.memory(*SAME_BUT_UTILISATION)
    a, b = logs
    more = (b["gpu_memory_utilization"] - a["gpu_memory_utilization"]) * a["gpu_total_gib"]
    return Tried(
        where="published start-up logs, A100",
        predicted=False,
        how=f"{a['model']} on one {a['gpu']}, vLLM {a['vllm_version']}; only the utilisation differs ({a['source']}).",
        header=("utilisation", "KV pool, GiB", "blocks of 16"),
        rows=tuple(
            (str(r["gpu_memory_utilization"]), f"{r['kv_cache_gib']:.2f}", str(r["kv_cache_tokens"] // BLOCK_TOKENS))
            for r in logs
        ),
        outcomes=(),
        notes=(
            f"Utilisation times total grows by {more:.2f} GiB, the pool by "
            f"{b['kv_cache_gib'] - a['kv_cache_gib']:.2f} GiB: the line, with twice the utilisation giving five times "
            "the blocks.",
        ),
    )


DOUBLES_POOL, DOUBLES_RUNNING = "the pool holds twice the tokens", "twice as many requests run"
DOUBLE_NEAR = 0.1
FP8_USES = (SMALL_POOL, 0.6, 0.7, 0.9)
CROWD = Mix("crowd", 480, a6000.CHAT.prompts, a6000.CHAT.output_tokens)
"""More chat requests than a bf16 pool holds, unless it is large."""


def fp8_cache() -> Finding:
    """Rule 9."""
    return Finding(
        number=9,
        rule="An fp8 KV cache doubles the concurrency.",
        criterion=f"Tokens in the pool, or most requests at once, are 2 times as many, give or take {DOUBLE_NEAR:.0%}.",
        tried=(_fp8_twin(), _fp8_logs(), _fp8_study()),
        turns_on=(
            "whether the pool is what limits the number of requests, and how much of it the buffers of the fp8 "
            "backend take"
        ),
        why=(
            "A token takes half the bytes, so that the pool holds twice the tokens, less what the memory model "
            "charges for the attention backend that fp8 needs, which shows where the pool is small. Twice as many "
            "requests run only where the pool is what limits them, not arrivals, `max_num_seqs` or the token budget, "
            "and each step then takes the longer. Not tried on the CPU engine."
        ),
    )


def judge_doubling(situation: str, part: str, ratio: float) -> Outcome:
    """Hold a ratio fp8 / bf16 against rule 9."""
    return Outcome(situation, part, within(ratio, 2.0, DOUBLE_NEAR))


def _fp8_twin() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for use in FP8_USES:
        for name, plain, fp8 in _fp8_points(use):
            situation = f"utilisation {use}, {name}"
            tokens = a6000.change(plain, fp8, "kv_tokens").mid
            running = a6000.change(plain, fp8, "most_running").mid
            outcomes.append(judge_doubling(situation, DOUBLES_POOL, tokens))
            outcomes.append(judge_doubling(situation, DOUBLES_RUNNING, running))
            ttft, tpot = (a6000.change(plain, fp8, f).mid for f in ("ttft_mean_s", "tpot_mean_s"))
            rows.append(
                (
                    f"{use}",
                    name,
                    f"{plain[0].kv_tokens} → {fp8[0].kv_tokens} (×{tokens:.2f})",
                    f"{a6000.mean(plain, 'most_running'):.0f} → {a6000.mean(fp8, 'most_running'):.0f} (×{running:.2f})",
                    percent(ttft),
                    percent(tpot),
                )
            )
    return Tried(
        where=a6000.WHERE,
        predicted=True,
        how=(
            f"{a6000.how([a6000.CHAT], 'Or ')} {CROWD.text}, one run; `max_num_seqs` {CROWD.requests}. The twin takes "
            "fp8 to halve the bytes read, and knows no cost of converting them."
        ),
        header=("utilisation", "load", "pool, tokens", "most running", "TTFT mean", "TPOT mean"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )


def _fp8_points(use: float) -> Iterator[tuple[str, Sequence[Point], Sequence[Point]]]:
    """Yield each load with its points for a bf16 and an fp8 cache."""
    args = {"gpu_memory_utilization": use, "max_model_len": 4096, "max_num_seqs": CROWD.requests}
    plain, fp8 = (a6000.points(a6000.CHAT, 0.5, **args, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    yield "50%", plain, fp8
    crowd = a6000.at_once(CROWD)
    once = [a6000.succeeded(a6000.play(crowd, **args, kv_cache_dtype=dtype)) for dtype in ("auto", "fp8")]
    yield f"{CROWD.requests} at once", once[:1], once[1:]


SAME_BUT_TYPE = (("m098", "m111"), ("m095", "m112"))


def _fp8_logs() -> Tried:
    found = [published.memory(*pair) for pair in SAME_BUT_TYPE]
    ratios = [fp8["kv_cache_tokens"] / plain["kv_cache_tokens"] for plain, fp8 in found]
    return Tried(
        where="published start-up logs, H100",
        predicted=False,
        how=f"One H100-80GB, vLLM 0.19; only the cache's type differs ({found[0][0]['source']}).",
        header=("model", "pool, tokens", "with fp8", "ratio"),
        rows=tuple(
            (plain["model"], str(plain["kv_cache_tokens"]), str(fp8["kv_cache_tokens"]), f"{ratio:.3f}")
            for (plain, fp8), ratio in zip(found, ratios, strict=True)
        ),
        outcomes=tuple(
            judge_doubling(plain["model"], DOUBLES_POOL, ratio) for (plain, _), ratio in zip(found, ratios, strict=True)
        ),
    )


def _fp8_study() -> Tried:
    found = {
        name: {
            "tokens": [run["params"]["kv_cache_tokens"] for run in runs],
            "running": [run["running"] for run in runs],
            "rate": [run["requests_per_s"] for run in runs],
            "itl_ms": [run["itl_mean_ms"] for run in runs],
        }
        for name, runs in published.full_pools().items()
    }
    middle = {name: {key: statistics.median(values) for key, values in runs.items()} for name, runs in found.items()}
    more = {key: middle["fp8"][key] / middle["bf16"][key] for key in middle["bf16"]}
    return Tried(
        where="published study, A10G",
        predicted=False,
        how=(
            "Qwen2.5-7B on one A10G, vLLM 0.22, about 300 requests of 512 + 128 tokens kept in the engine: medians "
            "of the configurations whose pool was full (they differ in much else, so no ratio is judged; "
            "graz-dev/vllm-benchmark:studies/0-explorative)."
        ),
        header=("cache", "configurations", "pool, tokens", "running", "requests/s", "ITL mean"),
        rows=tuple(
            (
                name,
                str(len(found[name]["tokens"])),
                f"{m['tokens']:.0f}",
                f"{m['running']:.0f}",
                f"{m['rate']:.2f}",
                f"{m['itl_ms']:.0f} ms",
            )
            for name, m in middle.items()
        ),
        outcomes=(),
        notes=(
            f"Where the pool is full, requests run in proportion to its tokens: ×{more['tokens']:.2f} and "
            f"×{more['running']:.2f}. Gaps between tokens were ×{more['itl_ms']:.2f} as long, so that no more than "
            f"×{more['rate']:.2f} requests a second were done.",
        ),
    )
