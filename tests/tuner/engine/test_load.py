from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_source import Event, ScriptedSource, ask, in_jumping_time, tokens, workload

from tuner.engine.load import LoadAbortedError, LoadResult, run_load
from tuner.engine.protocol import EngineDiedError, TokenDelta
from tuner.workload.model import Request, Workload

pytestmark = pytest.mark.usefixtures("frozen_heap")

FINISH = TokenDelta(0, finish_reason="length")


def times(*expected: float) -> Any:
    return pytest.approx(expected, abs=1e-6)


def drive(source: ScriptedSource, load: Workload, **options: Any) -> LoadResult:
    return in_jumping_time(lambda clock: run_load(source, load, id_prefix="t", clock=clock, **options))


def drive_until(source: ScriptedSource, load: Workload, stop_after_s: float) -> LoadResult:
    async def main(clock: Callable[[], float]) -> LoadResult:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        return await run_load(source, load, id_prefix="t", clock=clock, stop=stop)

    return in_jumping_time(main)


def test_every_token_has_the_time_at_which_it_arrived() -> None:
    source = ScriptedSource(lambda request, _: tokens(request.output_tokens, gap_s=0.05, first_s=0.4))

    result = drive(source, workload(ask(0.0), ask(0.25)))

    first, second = result.records
    assert first.token_times_s == times(0.4, 0.45, 0.5)
    assert second.token_times_s == times(0.65, 0.7, 0.75)
    assert (second.scheduled_s, second.sent_s, second.first_token_s, second.last_token_s) == times(
        0.25, 0.25, 0.65, 0.75
    )
    assert [r.output_tokens for r in result.records] == [3, 3]
    assert [r.finish_reason for r in result.records] == ["length", "length"]
    assert [r.error for r in result.records] == [None, None]
    assert result.duration_s == pytest.approx(0.75)


def test_duration_runs_from_the_first_scheduled_arrival() -> None:
    result = drive(ScriptedSource(lambda *_: tokens(3, gap_s=1.0)), workload(ask(2.0)))

    assert result.duration_s == pytest.approx(3.0)


def test_open_loop_keeps_its_times_however_slow_the_engine_is() -> None:
    source = ScriptedSource(lambda *_: tokens(3, gap_s=100.0))
    arrivals = [i * 0.1 for i in range(50)]

    result = drive(source, workload(*map(ask, arrivals)))

    assert [r.sent_s for r in result.records] == times(*arrivals)
    assert result.lateness_s == times(*[0.0] * 50)
    assert source.most_in_flight == 50


def test_requests_out_of_order_are_sent_in_order_of_arrival_and_reported_in_order_of_the_workload() -> None:
    result = drive(ScriptedSource(lambda *_: tokens(3, gap_s=0.1)), workload(ask(2.0), ask(1.0)))

    assert [r.sent_s for r in result.records] == times(2.0, 1.0)
    assert [r.request_id for r in result.records] == ["t-0-0", "t-0-1"]


def test_role_chunk_without_tokens_is_not_the_first_token() -> None:
    script = [Event(0.1, TokenDelta(0)), Event(0.4, TokenDelta(1)), Event(0.1, TokenDelta(2)), Event(0.1, FINISH)]

    (record,) = drive(ScriptedSource({0: script}), workload(ask())).records

    assert record.first_token_s == pytest.approx(0.5)
    assert record.last_token_s == pytest.approx(0.6)
    assert record.finish_reason == "length"


def test_delta_of_several_tokens_counts_as_tokens_that_arrived_together() -> None:
    script = [Event(0.5, TokenDelta(2)), Event(0.5, TokenDelta(3, finish_reason="length"))]

    (record,) = drive(ScriptedSource({0: script}), workload(ask(output_tokens=5))).records

    assert record.token_times_s == times(0.5, 0.5, 1.0, 1.0, 1.0)
    assert record.output_tokens == 5
    assert record.error is None


def test_stamps_of_the_engine_are_shifted_onto_the_clock_of_the_run() -> None:
    def script(_: Request, __: int) -> Sequence[Event]:
        now = asyncio.get_running_loop().time()
        last = TokenDelta(
            3, "length", queued_s=now + 0.01, first_scheduled_s=now + 0.2, cached_tokens=16, preemptions=2
        )
        return [Event(1.0, last)]

    (record,) = drive(ScriptedSource(script), workload(ask(5.0)), repeat=3).records

    assert (record.queued_s, record.first_scheduled_s) == times(5.01, 5.2)
    assert (record.cached_tokens, record.preemptions, record.repeat) == (16, 2, 3)


def test_what_the_engine_does_not_tell_stays_unknown() -> None:
    (record,) = drive(ScriptedSource({0: tokens(3, 0.1)}), workload(ask())).records

    assert (record.queued_s, record.first_scheduled_s, record.cached_tokens) == (None, None, None)


def test_request_held_back_by_the_cap_keeps_its_scheduled_arrival() -> None:
    source = ScriptedSource(lambda *_: tokens(1, gap_s=1.0))

    result = drive(source, workload(*[ask(t, 1) for t in (0.0, 0.1, 0.2, 0.3)], max_concurrency=2))

    assert source.most_in_flight == 2
    assert [r.scheduled_s for r in result.records] == times(0.0, 0.1, 0.2, 0.3)
    assert [r.sent_s for r in result.records] == times(0.0, 0.1, 1.0, 1.1)
    assert result.held_back_s == times(0.0, 0.0, 0.8, 0.8)
    assert result.lateness_s == times(0.0, 0.0, 0.0, 0.0)


def test_wait_behind_another_held_back_request_is_the_caps_and_not_the_clients() -> None:
    source = ScriptedSource(lambda *_: tokens(1, gap_s=1.0))

    result = drive(source, workload(*[ask(0.0, 1)] * 3, max_concurrency=1))

    assert result.held_back_s == times(0.0, 1.0, 2.0)
    assert result.lateness_s == times(0.0, 0.0, 0.0)


def test_client_that_falls_behind_shows_as_lateness() -> None:
    class Blocking(ScriptedSource):
        async def generate(self, request: Request, request_id: str) -> Any:
            asyncio.get_running_loop().now_s += 0.3  # type: ignore[attr-defined]  # as a loop that is kept busy
            async for delta in super().generate(request, request_id):
                yield delta

    result = drive(Blocking(lambda *_: tokens(3, 1.0)), workload(ask(0.0), ask(0.1)))

    assert result.lateness_s == times(0.0, 0.2)
    assert result.held_back_s == (0.0, 0.0)


def test_closed_loop_user_thinks_after_the_end_of_the_previous_answer() -> None:
    source = ScriptedSource(lambda *_: tokens(2, gap_s=0.5))
    turns = [ask(output_tokens=2, user=user, think_s=think) for think in (9.0, 0.25, 2.0) for user in (0, 1)]

    result = drive(source, workload(*turns))

    assert [r.scheduled_s for r in result.records] == times(0.0, 0.0, 1.25, 1.25, 4.25, 4.25)
    assert result.lateness_s == times(*[0.0] * 6)
    assert source.most_in_flight == 2


def test_users_that_start_one_after_the_other_start_at_their_arrival() -> None:
    source = ScriptedSource(lambda *_: tokens(1, gap_s=1.0))

    result = drive(source, workload(ask(0.0, 1, user=0), ask(0.5, 1, user=1), ask(0.0, 1, user=0)))

    assert [r.sent_s for r in result.records] == times(0.0, 0.5, 1.0)


def test_error_of_one_request_stays_with_that_request() -> None:
    source = ScriptedSource({0: [Event(0.1, TokenDelta(1)), Event(0.1, ValueError("too long"))], 1: tokens(3, 0.5)})

    failed, fine = drive(source, workload(ask(), ask())).records

    assert failed.error == "ValueError: too long"
    assert failed.token_times_s == times(0.1)
    assert fine.error is None


def test_closed_loop_user_goes_on_after_an_error() -> None:
    source = ScriptedSource({0: [Event(0.5, ValueError("no"))], 1: tokens(3, 0.1)})

    result = drive(source, workload(ask(user=0), ask(user=0, think_s=1.0)))

    assert [r.scheduled_s for r in result.records] == times(0.0, 1.5)


def test_answer_shorter_than_asked_is_an_error() -> None:
    source = ScriptedSource({0: [Event(0.1, TokenDelta(1, finish_reason="abort"))], 1: [Event(0.1, TokenDelta(3))]})

    short, endless = drive(source, workload(ask(), ask())).records

    assert short.error == "1 of 3 tokens arrived (finish reason 'abort')"
    assert endless.error == "the stream ended without a finish reason after 3 of 3 tokens"


def test_dying_engine_ends_the_load_at_once_with_what_was_seen() -> None:
    scripts = {0: tokens(3, 0.1), 1: [Event(0.6, EngineDiedError("EngineCore exited"))], 2: tokens(3, 100.0)}
    source = ScriptedSource(scripts)

    with pytest.raises(LoadAbortedError, match="EngineCore exited") as caught:
        drive(source, workload(ask(), ask(), ask(), ask(1.0)))

    partial = caught.value.partial
    assert [r.error for r in partial.records] == [
        None,
        "the engine died: EngineCore exited",
        "cancelled before its last token",
    ]
    assert partial.unsent == 1
    assert not partial.stopped
    assert source.ended == {0: "finished", 1: "raised", 2: "aborted"}


def test_death_that_every_stream_reports_is_raised_once() -> None:
    source = ScriptedSource(lambda *_: [Event(1.0, EngineDiedError("gone"))])

    with pytest.raises(LoadAbortedError, match="gone"):
        drive(source, workload(*[ask()] * 5, *[ask(user=u) for u in range(5)]))


def test_stop_cancels_what_is_in_flight_and_sends_nothing_more() -> None:
    source = ScriptedSource(lambda *_: tokens(3, gap_s=1.0), abort_s=0.5)

    result = drive_until(source, workload(*[ask(t) for t in (0.0, 1.0, 50.0)]), stop_after_s=2.5)

    assert result.stopped
    assert result.unsent == 1
    assert [r.output_tokens for r in result.records] == [2, 1]
    assert {r.error for r in result.records} == {"cancelled before its last token"}
    assert source.in_flight == 0


def test_abort_that_fails_does_not_make_a_stopped_user_go_on() -> None:
    source = ScriptedSource(lambda *_: tokens(3, gap_s=1.0), abort_error=RuntimeError("abort failed"))

    result = drive_until(source, workload(ask(user=0), ask(user=0)), stop_after_s=0.5)

    assert result.unsent == 1
    assert result.records[0].error == "RuntimeError: abort failed"


def test_stop_after_the_end_changes_nothing() -> None:
    result = drive_until(ScriptedSource(lambda *_: tokens(3, 0.1)), workload(ask()), stop_after_s=99.0)

    assert not result.stopped
    assert result.records[0].error is None


def test_cancelled_load_aborts_every_request_and_leaves_no_task() -> None:
    source = ScriptedSource(lambda *_: tokens(3, gap_s=10.0))

    async def main(clock: Callable[[], float]) -> None:
        load = workload(*[ask()] * 3, ask(user=0), ask(user=1), max_concurrency=4)
        task = asyncio.create_task(run_load(source, load, id_prefix="t", clock=clock))
        await asyncio.sleep(5.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_jumping_time(main)
    assert set(source.ended.values()) == {"aborted"}
    assert source.in_flight == 0


def test_progress_is_told_after_each_request() -> None:
    told: list[str] = []

    drive(ScriptedSource(lambda *_: tokens(3, 0.1)), workload(ask(), ask()), on_progress=told.append)

    assert told == ["run 1/2", "run 2/2"]


def test_empty_prompt_list_is_an_empty_result() -> None:
    result = drive(ScriptedSource({}), workload())

    assert (result.records, result.duration_s) == ((), 0.0)


events = st.lists(
    st.builds(
        Event,
        wait_s=st.sampled_from([0.0, 0.001, 0.3, 2.0]),
        what=st.one_of(
            st.builds(TokenDelta, token_count=st.integers(0, 4), finish_reason=st.sampled_from([None, None, "length"])),
            st.just(ValueError("one request")),
        ),
    ),
    max_size=6,
)
requests = st.builds(
    ask,
    arrival_s=st.sampled_from([0.0, 0.5, 1.0, 7.0]),
    output_tokens=st.integers(1, 6),
    user=st.sampled_from([None, None, 0, 1]),
    think_s=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=8, deadline=None)
@given(
    cases=st.lists(st.tuples(requests, events), min_size=1, max_size=8),
    cap=st.one_of(st.none(), st.integers(1, 3)),
    stop_after_s=st.sampled_from([0.0, 0.4, 1e6]),
)
def test_any_order_of_token_events_is_recorded_whole(
    cases: list[tuple[Request, list[Event]]], cap: int | None, stop_after_s: float
) -> None:
    source = ScriptedSource({i: script for i, (_, script) in enumerate(cases)})

    result = drive_until(source, workload(*[r for r, _ in cases], max_concurrency=cap), stop_after_s)

    assert len(result.records) + result.unsent == len(cases)
    assert source.in_flight == 0
    assert source.most_in_flight <= (cap or len(cases))
    assert result.stopped or result.unsent == 0
    for record, lateness_s, held_back_s in zip(result.records, result.lateness_s, result.held_back_s, strict=True):
        index = int(record.request_id.rpartition("-")[2])
        script = cases[index][1]
        assert record.scheduled_s + held_back_s + lateness_s == pytest.approx(record.sent_s)
        assert abs(lateness_s) < 2e-6
        assert held_back_s >= 0
        assert record.output_tokens == len(record.token_times_s)
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert (record.first_token_s is None) == (not record.token_times_s)
        if not result.stopped:
            assert list(record.token_times_s) == times(*scripted_times(record.sent_s, script))


def scripted_times(sent_s: float, script: list[Event]) -> list[float]:
    expected: list[float] = []
    now = sent_s
    for event in script:
        now += event.wait_s
        if isinstance(event.what, BaseException):
            break
        expected += [now] * event.what.token_count
    return expected
