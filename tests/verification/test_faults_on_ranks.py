"""Each injected fault that lies between ranks does what its description says; two ranks, one start for all tests.

Run: pytest -n 0 tests/verification/test_faults_on_ranks.py. BOUND as in test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsaccum.engine.process import Ranks
from dsaccum.instruments.collectives import CollectiveRecorder
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.faults import FAULTS
from dsaccum.verification.subject.loops import Subject
from tests.instruments.shared import measured_once
from tests.verification.planting import (
    Run,
    difference,
    due_weights,
    make_case,
    mean_gradients,
    norm,
    run,
    targets,
    weighted,
)

pytestmark = pytest.mark.distributed

BOUND, STEPS, LIMIT = 3e-6, 3, 0.2
CASES: dict[str, dict[str, Any]] = {
    "clean": {},
    "clean, ZeRO 3": {"stage": 3},
    "micro-batch-dropped": {},
    "micro-batch-dropped, ZeRO 3": {"stage": 3},
    "mean-of-means": {},
    "rank-mean-of-means": {},
    "rank-mean-of-means, ZeRO 2": {"stage": 2},
    "rank-mean-of-means, hf-labels": {"loop": "hf-labels"},
    "ranks-summed": {},
    "ranks-summed, ZeRO 3": {"stage": 3},
    "ranks-not-reduced": {},
    "ranks-not-reduced, bf16": {"bf16": True},
    "ranks-share-data": {},
    "samples-misplaced": {},
    "ranks-start-apart": {},
    "ranks-start-apart, bf16": {"bf16": True},
    "ranks-start-apart, ZeRO 1": {"stage": 1},
    "ranks-drift-apart": {},
    "ranks-drift-apart, ZeRO 2": {"stage": 2},
    "reduced-every-micro-step": {},
    "clipped-before-reduction": {"clipping": LIMIT},
    "clipped-before-reduction, ZeRO 1": {"clipping": LIMIT, "stage": 1},
    "clipped-every-micro-step": {"clipping": LIMIT},
    "clipping-mismatch, ZeRO 3": {"stage": 3},
    "stale-gradients, ZeRO 3": {"stage": 3},
    "non-finite-gradient, ZeRO 2": {"stage": 2},
    "clean, again": {},
}
"""Name -> what it runs; the part before a comma is the fault."""
Runs = dict[str, list[Run]]
"""Of each case, by rank."""


def case_of(name: str) -> Case:
    fault = name.partition(",")[0]
    return make_case(None if fault == "clean" else fault, ranks=2, steps=STEPS, **CASES[name])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    by_rank = measured_once(tmp_path_factory, "faults-two-ranks", measure, world_size=2)
    return {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}


def measure(ranks: Ranks) -> dict[str, Run]:
    found = {name: run(ranks, case_of(name)) for name in CASES}
    found["traffic"] = run(ranks, case_of("clean"), _gradient_bytes)
    found["traffic, reduced"] = run(ranks, case_of("reduced-every-micro-step"), _gradient_bytes)
    return found


def _gradient_bytes(subject: Subject, loop: Callable[[], object]) -> list[int]:
    """Of the micro-steps of two windows."""
    with CollectiveRecorder(subject.engine) as recorder:
        loop()
    return [step.gradient_bytes for step in recorder.per_micro_step()[: 2 * STEPS]]


def test_everything_is_taken_away_again(runs: Runs) -> None:
    assert {name: ran.left for name, ranks in runs.items() for ran in ranks if ran.left} == {}


def test_planted_faults_leave_nothing_for_later_runs(runs: Runs) -> None:
    for first, again in zip(runs["clean"], runs["clean, again"], strict=True):
        assert [window.checksums for window in first.windows] == [window.checksums for window in again.windows]


def _dropped(case: Case) -> list[list[float]]:
    weights = due_weights(case)
    weights[0][1] = 0.0
    return weights


def _equal_ranks(case: Case) -> list[list[float]]:
    return [[count / sum(row) / 2 for count in row] for row in targets(case)]


def _summed(case: Case) -> list[list[float]]:
    return [[2 * weight for weight in row] for row in due_weights(case)]


WEIGHTS: dict[str, Callable[[Case], list[list[float]]]] = {
    "clean": due_weights,
    "micro-batch-dropped": _dropped,
    "mean-of-means": lambda case: [[1 / (2 * STEPS)] * STEPS] * 2,
    "rank-mean-of-means": _equal_ranks,
    "ranks-summed": _summed,
}


@pytest.mark.parametrize("name", [name for name in CASES if name.partition(",")[0] in WEIGHTS])
def test_micro_batches_weigh_what_the_mistake_gives_them(runs: Runs, name: str) -> None:
    fault, case = name.partition(",")[0], case_of(name)
    expected = weighted(case, WEIGHTS[fault](case))
    for found in runs[name]:
        assert difference(found.gradient(), expected) < BOUND
    if fault != "clean":
        assert difference(runs["clean"][0].gradient(), expected) > 1e-2


def test_each_rank_keeps_its_own_gradient(runs: Runs) -> None:
    """Its sum over the window, W times what the mean over ranks would have left of it."""
    case = case_of("clean")
    for rank, (found, bf16) in enumerate(zip(runs["ranks-not-reduced"], runs["ranks-not-reduced, bf16"], strict=True)):
        own = [[2 * weight * (rank == r) for weight in row] for r, row in enumerate(due_weights(case))]
        assert difference(found.gradient(), weighted(case, own)) < BOUND
        assert difference(bf16.gradient(), weighted(case, own)) < 0.02  # bf16 rounds by up to 2^-9 at each operation
    assert all(_differ(runs["ranks-not-reduced"], window) for window in (0, 1))


def test_all_ranks_read_what_is_rank_0s(runs: Runs) -> None:
    due = case_stream(case_of("clean"), 0).window(0)
    for found in runs["ranks-share-data"]:
        assert _same_fields(found.windows[0].micro_batches, due)


def test_only_rank_0_gets_the_wrong_sample(runs: Runs) -> None:
    fed = [found.windows[0].micro_batches for found in runs["samples-misplaced"]]
    due = [case_stream(case_of("clean"), rank).window(0) for rank in (0, 1)]
    assert [_same_fields(*pair) for pair in zip(fed, due, strict=True)] == [False, True]


def test_replicas_start_apart(runs: Runs) -> None:
    """At ZeRO 0 for good; at ZeRO 1 the first update gathers the parameters anew from one copy."""
    for name in ("ranks-start-apart", "ranks-start-apart, bf16"):
        assert _start_differs(runs[name])
        assert [_differ(runs[name], window) for window in (0, 1)] == [True, True]
    assert _start_differs(runs["ranks-start-apart, ZeRO 1"])
    assert not _differ(runs["ranks-start-apart, ZeRO 1"], 1)
    assert not _start_differs(runs["clean"])
    assert not _differ(runs["clean"], 1)


@pytest.mark.parametrize("name", ["ranks-drift-apart", "ranks-drift-apart, ZeRO 2"])
def test_one_parameter_drifts_apart(runs: Runs, name: str) -> None:
    first, second = runs[name]
    assert not _start_differs(runs[name])
    for window in (0, 1):
        sums = first.windows[window].checksums, second.windows[window].checksums
        assert [key for key in sums[0] if sums[0][key] != sums[1][key]] == ["transformer.h.0.attn.c_attn.bias"]


def test_gradients_travel_n_times(runs: Runs) -> None:
    """4 bytes for each fp32 element at the boundary; with the fault at each micro-step, and the gradient is right."""
    gradient = runs["clean"][0].gradient()
    whole = 4 * sum(tensor.numel() for tensor in gradient.values())
    for rank in (0, 1):
        assert runs["traffic"][rank].seen == 2 * [0, 0, whole]
        assert runs["traffic, reduced"][rank].seen == 2 * [whole, whole, whole]
        assert difference(runs["reduced-every-micro-step"][rank].gradient(), gradient) < BOUND


@pytest.mark.parametrize("name", ["clipped-before-reduction", "clipped-before-reduction, ZeRO 1"])
def test_each_rank_clips_its_own_sum(runs: Runs, name: str) -> None:
    case = case_of("clean")
    expected: dict[str, Tensor] = {}
    for own in _own_sums(case):
        assert norm(own) > LIMIT
        expected = {key: expected.get(key, 0) + t * LIMIT / (norm(own) + 1e-6) / 2 for key, t in own.items()}
    for found in runs[name]:
        assert difference(found.gradient(), expected) < BOUND


def test_each_rank_clips_after_each_micro_step(runs: Runs) -> None:
    case = case_of("clean")
    expected: dict[str, Tensor] = {}
    for row, gradients in zip(due_weights(case), mean_gradients(case), strict=True):
        own: dict[str, Tensor] = {}
        for step, (weight, gradient) in enumerate(zip(row, gradients, strict=True)):
            own = {key: own.get(key, 0) + 2 * weight * t for key, t in gradient.items()}
            if step < STEPS - 1:
                coefficient = min(1.0, LIMIT / (norm(own) + 1e-6))
                own = {key: t * coefficient for key, t in own.items()}
        expected = {key: expected.get(key, 0) + t / 2 for key, t in own.items()}
    for found in runs["clipped-every-micro-step"]:
        assert difference(found.gradient(), expected) < BOUND


def test_partitioned_gradients_are_reached_as_well(runs: Runs) -> None:
    """ZeRO 3 on two ranks: the clipping limit, and what the window before left."""
    clean = runs["clean, ZeRO 3"][0]
    before = norm(clean.gradient())
    assert norm(runs["clipping-mismatch, ZeRO 3"][0].saw()) == pytest.approx(before / 2, rel=1e-5)
    left_over = {key: clean.gradient(0)[key] + clean.gradient(1)[key] for key in clean.gradient()}
    assert difference(runs["stale-gradients, ZeRO 3"][0].gradient(1), left_over) < BOUND


def test_nan_comes_from_one_rank_alone(runs: Runs) -> None:
    found = runs["non-finite-gradient, ZeRO 2"]
    assert [ran.windows[0].finite for ran in found] == [[True, False, True], [True, True, True]]
    assert [ran.windows[0].steps[0].applied for ran in found] == [False, False]


@pytest.mark.parametrize("identifier", FAULTS)
def test_every_fault_can_show_itself_somewhere(identifier: str) -> None:
    case = make_case(identifier, ranks=2, steps=STEPS, clipping=LIMIT, last_window="short")
    if identifier.startswith("loss-scale-not"):
        case = replace(case, precision="fp16")  # which needs a GPU, or a CPU that is told to accept it
    assert FAULTS[identifier].inapplicable(case) is None


def _own_sums(case: Case) -> list[dict[str, Tensor]]:
    """What each rank adds up in a window, before the mean over ranks."""
    weights = due_weights(case)
    return [
        weighted(case, [[2 * weight * (rank == r) for weight in row] for r, row in enumerate(weights)])
        for rank in (0, 1)
    ]


def _differ(ranks: list[Run], window: int) -> bool:
    return ranks[0].windows[window].checksums != ranks[1].windows[window].checksums


def _start_differs(ranks: list[Run]) -> bool:
    return ranks[0].start != ranks[1].start


def _same_fields(fed: list[dict[str, Tensor]], due: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(found[key], right[key]) for found, right in zip(fed, due, strict=True) for key in right)
