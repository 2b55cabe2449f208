from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.design import value_at
from tuner.proposal import Proposal
from tuner.proposer import Proposer
from tuner.search.encoding import decode, encode
from tuner.search.suggest import Past
from tuner.space import Parameter
from tuner.spec import Search

SPACE = {
    "max_num_seqs": Parameter(choices=(1, 4, 16, 64)),
    "max_num_batched_tokens": Parameter(low=64, high=4096, log=True),
    "enable_prefix_caching": Parameter(choices=(True, False)),
    "gpu_memory_utilization": Parameter(low=0.5, high=0.95),
}
DEFAULTS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.9,
}


def open_study(folder: Path, startup_trials: int = 4) -> Proposer:
    return Proposer(
        f"sqlite:///{folder}/optuna.db",
        "study",
        SPACE,
        Search(startup_trials=startup_trials),
        constraints=["ttft_p99_s <= 20"],
        objectives=[(True, 1), (True, 1)],
    )


def tell(proposer: Proposer, proposal: Proposal) -> None:
    """A made-up machine: more than 2048 batched tokens does not fit."""
    tokens = proposal.changes.get("max_num_batched_tokens", 2048)
    if tokens > 2048:
        proposer.tell_violation(proposal.number, tokens / 2048 - 1)
        return
    violations = {"memory": tokens / 2048 - 1.0001, "ttft_p99_s <= 20": -0.5}
    proposer.tell_measured(proposal.number, [1000 / tokens, 0.01 * math.log(tokens)], violations)


def test_reference_then_recipes_then_design_then_sampler(tmp_path: Path) -> None:
    proposer = open_study(tmp_path)
    proposer.enqueue("reference", {}, DEFAULTS)
    proposer.enqueue("recipe:low-latency", {"max_num_seqs": 16}, DEFAULTS)

    sources = []
    for _ in range(7):
        proposal = proposer.ask()
        sources.append(proposal.source)
        tell(proposer, proposal)

    assert sources == ["reference", "recipe:low-latency", "design", "design", "sampler", "sampler", "sampler"]


def test_what_is_queued_to_be_tried_at_once_goes_before_the_rest_of_the_queue(tmp_path: Path) -> None:
    proposer = open_study(tmp_path)
    proposer.enqueue("recipe:low-latency", {"max_num_seqs": 16}, DEFAULTS)
    proposer.enqueue("operator", {"max_num_seqs": 4}, DEFAULTS, at_once=True)
    proposer.enqueue("operator", {"dtype": "half"}, DEFAULTS, at_once=True)

    asked = [proposer.ask() for _ in range(3)]
    assert [(p.source, dict(p.changes)) for p in asked] == [
        ("operator", {"max_num_seqs": 4}),
        ("operator", {"dtype": "half"}),
        ("recipe:low-latency", {"max_num_seqs": 16}),
    ]
    for proposal in asked:
        tell(proposer, proposal)
    assert [t.state for t in proposer.told().values()] == ["COMPLETE", "COMPLETE", "FAIL"]


CONDITIONAL = {
    "max_num_seqs": Parameter(choices=(1, 4, 16, 64)),
    "enable_chunked_prefill": Parameter(choices=(True, False)),
    "long_prefill_token_threshold": Parameter(choices=(128, 512, 2048), when={"enable_chunked_prefill": (True,)}),
}


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random"])
def test_parameters_that_hang_on_others_are_proposed_and_learned_from_where_they_are_searched(
    tmp_path: Path, sampler: str
) -> None:
    def reopened() -> Proposer:
        address, search = f"sqlite:///{tmp_path}/optuna.db", Search(sampler=sampler, startup_trials=3)
        objectives = [(True, 1), (True, 1)]
        return Proposer(address, "study", CONDITIONAL, search, constraints=[], objectives=objectives)

    reopened().enqueue("reference", {}, {"max_num_seqs": 64, "enable_chunked_prefill": False})
    tried = []
    for _ in range(12):  # each time from what is stored alone
        proposer = reopened()
        changes = (proposal := proposer.ask()).changes
        where = {"enable_chunked_prefill": False, "max_num_seqs": 64, **changes}
        assert ("long_prefill_token_threshold" in changes) == where["enable_chunked_prefill"]
        tried.append(tuple(sorted(where.items())))
        seqs, piece = where["max_num_seqs"], where.get("long_prefill_token_threshold", 4096)
        proposer.tell_measured(proposal.number, [1 + piece / 500, 0.1 + seqs / piece], {"memory": -0.1})

    told = reopened().told().values()
    assert [t.state for t in told] == ["COMPLETE"] * 12
    if sampler == "gp":
        assert len(set(tried)) == 12  # of 16: nothing is tried twice


def test_value_of_a_parameter_that_is_not_searched_there_has_no_place_in_the_space(tmp_path: Path) -> None:
    proposer = Proposer(
        f"sqlite:///{tmp_path}/optuna.db", "study", CONDITIONAL, Search(), constraints=[], objectives=[(True, 1)]
    )
    defaults = {"max_num_seqs": 64, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0}
    unchunked = {"enable_chunked_prefill": False}

    assert proposer.enqueue("operator", unchunked, defaults)
    assert not proposer.enqueue("operator", {**unchunked, "long_prefill_token_threshold": 512}, defaults)


def test_every_proposal_lies_in_the_space(tmp_path: Path) -> None:
    proposer = open_study(tmp_path)
    for _ in range(6):
        proposal = proposer.ask()
        assert all(SPACE[name].contains(value) for name, value in proposal.changes.items())
        assert proposal.changes.keys() == SPACE.keys()
        tell(proposer, proposal)


def test_recipe_that_sets_what_is_not_searched_is_proposed_and_teaches_nothing(tmp_path: Path) -> None:
    proposer = open_study(tmp_path)

    teaches = proposer.enqueue("recipe:chat", {"max_model_len": 8192}, DEFAULTS)
    proposal = proposer.ask()
    proposer.tell_measured(proposal.number, [1.0, 1.0], {"memory": -0.1, "ttft_p99_s <= 20": -0.1})

    assert not teaches
    assert not proposal.in_space
    assert proposal.changes == {"max_model_len": 8192}
    assert proposer.open_trials() == []
    assert past_of_study(proposer).measured == 0


@pytest.mark.parametrize(
    "changes", [{"max_num_seqs": 32}, {"max_num_batched_tokens": 16384}, {"max_num_seqs": 16, "max_model_len": 4096}]
)
def test_recipe_beside_the_space_teaches_what_it_measured(tmp_path: Path, changes: dict[str, int]) -> None:
    proposer = open_study(tmp_path)

    teaches = proposer.enqueue("recipe:chat", changes, {**DEFAULTS, "max_model_len": 4096, "max_num_seqs": 30})
    proposal = proposer.ask()
    proposer.tell_measured(proposal.number, [math.e, 1.0], {"memory": -0.1, "ttft_p99_s <= 20": -0.2})

    past = past_of_study(open_study(tmp_path))
    assert teaches
    assert past.measured == 1
    assert past.values.tolist() == [[1.0, 0.0]]
    assert past.violations.tolist() == [[-0.1, -0.2]]
    assert list(past.beside.values()) == [changes]
    assert proposer.open_trials() == []


def test_recipe_beside_the_space_that_cannot_run_teaches_its_violation_alone(tmp_path: Path) -> None:
    proposer = open_study(tmp_path)
    proposer.enqueue("recipe:chat", {"max_num_seqs": 100}, DEFAULTS)

    proposer.tell_violation(proposer.ask().number, 0.4)

    past = past_of_study(proposer)
    assert past.measured == 0
    assert past.violations[0][0] == 0.4
    assert math.isnan(past.violations[0][1])


def past_of_study(proposer: Proposer) -> Past:
    """What the model learns from."""
    return proposer._past(proposer._study.get_trials())


def test_resumed_study_proposes_what_an_uninterrupted_one_would(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = open_study(tmp_path / "a")
    for _ in range(6):
        tell(whole, whole.ask())
    for _ in range(6):
        resumed = open_study(tmp_path / "b")
        tell(resumed, resumed.ask())

    assert open_study(tmp_path / "b").ask() == whole.ask()


def test_choice_that_is_a_mapping_is_found_again_by_the_next_run(tmp_path: Path) -> None:
    modes = ({"mode": 0, "cudagraph_mode": "NONE"}, {"mode": 3}, None)
    space = {**SPACE, "compilation_config": Parameter(choices=modes)}
    proposed = []
    for _ in range(12):
        proposer = Proposer(
            f"sqlite:///{tmp_path}/optuna.db",
            "study",
            space,
            Search(startup_trials=6),
            constraints=["ttft_p99_s <= 20"],
            objectives=[(True, 1), (True, 1)],
        )
        proposal = proposer.ask()
        proposed.append(proposal)
        tell(proposer, proposal)

    assert {p.source for p in proposed} == {"design", "sampler"}
    assert all(mode in [p.changes["compilation_config"] for p in proposed] for mode in modes)


def test_trial_left_open_by_a_crash_is_known_after_reopening(tmp_path: Path) -> None:
    proposal = open_study(tmp_path).ask()

    reopened = open_study(tmp_path)

    assert reopened.open_trials() == [proposal]


def test_telling_twice_changes_nothing(tmp_path: Path) -> None:
    proposer = open_study(tmp_path)
    proposal = proposer.ask()
    tell(proposer, proposal)
    tell(proposer, proposal)
    proposer.tell_unusable(proposal.number)

    assert proposer.open_trials() == []


def test_failures_and_violations_in_any_mix_do_not_stop_the_sampler(tmp_path: Path) -> None:
    proposer = open_study(tmp_path, startup_trials=2)
    for index in range(5):
        proposal = proposer.ask()
        if index % 3 == 0:
            proposer.tell_unusable(proposal.number)
        elif index % 3 == 1:
            proposer.tell_violation(proposal.number, 0.3)
        else:
            tell(proposer, proposal)

    assert proposer.ask().source == "sampler"


PARAMETERS = st.sampled_from(
    [*SPACE.values(), Parameter(low=0, high=10, step=2), Parameter(choices=("a", None, [1, 2], {"x": 1, "b": 2}))]
)


@given(PARAMETERS, st.floats(0, 1, exclude_max=True))
def test_every_position_is_a_value_that_survives_the_translation(parameter: Parameter, position: float) -> None:
    value = value_at(parameter, position)

    assert parameter.contains(value)
    assert decode(parameter, encode(parameter, value)) == pytest.approx(value)


def test_range_of_billions_of_bytes_is_searched_without_listing_them(tmp_path: Path) -> None:
    space = {
        "kv_cache_memory_bytes": Parameter(low=2**28, high=2**32, log=True),
        "max_num_seqs": Parameter(choices=(1, 4, 16)),
    }
    proposer = Proposer(
        f"sqlite:///{tmp_path}/optuna.db",
        "study",
        space,
        Search(startup_trials=2),
        constraints=[],
        objectives=[(True, 1)],
    )
    for _ in range(4):
        proposal = proposer.ask()
        assert isinstance(proposal.changes["kv_cache_memory_bytes"], int)
        assert all(space[name].contains(value) for name, value in proposal.changes.items())
        proposer.tell_measured(proposal.number, [proposal.changes["kv_cache_memory_bytes"] / 1e9], {"memory": -0.1})
