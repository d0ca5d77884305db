"""What a plan says beside its table: each line where it helps, and nowhere else.

Run: pytest tests/planning/test_advice.py -n 0. Not covered: whether the figures it speaks of are right.
"""

from __future__ import annotations

import pytest

from dsaccum.planning.advice import advice_for
from dsaccum.planning.record import WayRecord
from tests.report import kinds

GIB = 2**30
SUGGESTED = 50_000_000 * 4
"""Bytes of the bucket that is suggested, in fp32."""


def way(memory: int = 24 * GIB, **changes: object) -> WayRecord:
    """In 24 GiB B = 2 fits, with a peak of 18."""
    return kinds.way(memory, stage=1).model_copy(update={"largest_micro_batch": 2, **changes})


def said(chosen: WayRecord) -> str:
    return "; ".join(advice_for(chosen, chosen, [], effective_batch=16, ranks=2))


def small(bucket: int) -> WayRecord:
    """A way whose peak is so small that any bucket is a large share of it."""
    tiny = kinds.split(1).model_copy(update={"peak_bytes": 2 * bucket})
    return way(best=tiny, reduce_bucket_bytes=bucket, largest_micro_batch=1)


@pytest.mark.parametrize("bucket", [SUGGESTED, SUGGESTED // 2, 40_000])
def test_no_bucket_is_advised_where_it_is_no_larger_already(bucket: int) -> None:
    assert said(small(bucket)) == ""


def test_a_larger_bucket_is_advised_against_where_it_is_much_of_the_peak() -> None:
    assert said(small(SUGGESTED + 4)).startswith(
        'the reduce bucket is 50% of the peak; "reduce_bucket_size": 50000000 in zero_optimization'
    )
    assert said(way(reduce_bucket_bytes=18 * GIB // 20)) == ""
    assert said(way(reduce_bucket_bytes=18 * GIB // 20 + GIB // 10)) != ""
    assert said(small(SUGGESTED + 4).model_copy(update={"zero_stage": 0})) == ""  # ZeRO 0 has none


def test_a_larger_micro_batch_that_does_not_divide_is_named_with_the_batch_that_would_use_it() -> None:
    assert said(way(largest_micro_batch=5)) == (
        "B = 5 would fit too, but does not divide 16 / 2; --effective-batch 20 would use it"
    )
    assert said(way(largest_micro_batch=4)) == "", "it divides, and does not fit with the whole window's data"


def test_where_nothing_fits_the_nearest_way_that_does_is_named() -> None:
    asked = way(8 * GIB)
    fits = way(changes=['"zero_optimization": {"stage": 3}', "model.activation_checkpointing: true"])
    assert advice_for(asked, None, [asked, fits], 16, 2) == [
        'nearest that fits: "zero_optimization": {"stage": 3}; model.activation_checkpointing: true'
    ]
    assert advice_for(asked, None, [asked], 16, 2)[0].startswith("none of these ways fits")
