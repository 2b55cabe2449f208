from __future__ import annotations

import pytest

from tuner.engine.cluster import Node, Wanted, _reservation, preflight
from tuner.errors import PreflightError


def node(name: str, gpus: int, *types: str, cpus: int = 32) -> Node:
    return Node(name * 8, f"10.0.0.{ord(name)}", cpus, gpus, frozenset(types))


A6000, H100, HEAD = node("a", 8, "RTX-A6000"), node("h", 8, "H100"), node("c", 0)


@pytest.mark.parametrize(
    ("wanted", "engines"),
    [
        (Wanted(gpus=4), 4),
        (Wanted(gpus=3), 4),
        (Wanted(gpus=8, accelerator_type="H100"), 1),
        (Wanted(gpus=16), 0),
        (Wanted(gpus=16, nodes=2), 1),
        (Wanted(gpus=1, cpus=8), 8),
        (Wanted(gpus=0, cpus=32), 3),
    ],
)
def test_as_many_engines_fit_as_each_machine_holds(wanted: Wanted, engines: int) -> None:
    assert wanted.engines_on([A6000, H100, HEAD]) == engines


def test_gpus_of_several_types_are_refused_unless_the_study_names_one() -> None:
    with pytest.raises(PreflightError, match=r"several types, H100, RTX-A6000; name one under resources\.accelerator"):
        preflight([A6000, H100], Wanted(gpus=4))

    preflight([A6000, H100], Wanted(gpus=4, accelerator_type="H100"))
    preflight([A6000, HEAD], Wanted(gpus=4))


def test_what_the_cluster_can_never_give_is_refused_with_what_is_there() -> None:
    with pytest.raises(PreflightError, match=r"sees no accelerator of type L4.*it sees RTX-A6000"):
        preflight([A6000, HEAD], Wanted(gpus=4, accelerator_type="L4"))
    with pytest.raises(PreflightError, match=r"asks for 16 GPUs .*10\.0\.0\.97 \(aaaaaaaa\): 8 GPUs"):
        preflight([A6000], Wanted(gpus=16))
    with pytest.raises(PreflightError, match=r"over 2 nodes \(resources\.nodes_per_engine\)"):
        preflight([A6000], Wanted(gpus=16, nodes=2))


def test_an_engine_on_one_machine_is_one_bundle_that_never_leaves_it() -> None:
    reserved = _reservation([A6000], Wanted(gpus=4, accelerator_type="RTX-A6000"))

    assert reserved == {
        "bundles": [{"CPU": 1, "GPU": 4, "accelerator_type:RTX-A6000": 0.001}],
        "strategy": "STRICT_PACK",
    }


def test_an_engine_over_machines_has_a_bundle_a_gpu_evenly_on_nodes_of_its_type() -> None:
    other = node("b", 8, "RTX-A6000")
    reserved = _reservation([HEAD, A6000, H100, other], Wanted(gpus=4, nodes=2, accelerator_type="RTX-A6000"))

    assert [bundle["GPU"] for bundle in reserved["bundles"]] == [1, 1, 1, 1]
    assert [bundle.get("CPU") for bundle in reserved["bundles"]] == [1, None, None, None]
    places = [selector["ray.io/node-id"] for selector in reserved["bundle_label_selector"]]
    assert places == [A6000.id, A6000.id, other.id, other.id]
