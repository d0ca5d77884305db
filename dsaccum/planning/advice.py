"""What a person should know beside the table."""

from __future__ import annotations

from collections.abc import Sequence

from dsaccum.planning.record import WayRecord

_LARGE_SHARE = 0.05
"""A reduce bucket of more than this share of the peak is worth a word."""
_SMALLER_BUCKET, _LARGEST_ELEMENT = 50_000_000, 4
"""Elements that are suggested, and bytes of one in fp32: what is no larger already is left as it is."""


def advice_for(
    asked: WayRecord, chosen: WayRecord | None, others: Sequence[WayRecord], effective_batch: int, ranks: int
) -> list[str]:
    """One line each; nothing where there is nothing to say."""
    return [
        *_about_bucket(chosen or asked),
        *_about_unused(chosen, effective_batch, ranks),
        *_about_fitting(chosen, others),
    ]


def _about_bucket(way: WayRecord) -> list[str]:
    peak = (way.best or way.splits[-1]).peak_bytes
    small = max(_LARGE_SHARE * peak, _SMALLER_BUCKET * _LARGEST_ELEMENT)
    if way.zero_stage == 0 or way.reduce_bucket_bytes <= small:
        return []
    share = way.reduce_bucket_bytes / peak
    return [
        f"the reduce bucket is {share:.0%} of the peak; "
        f'"reduce_bucket_size": {_SMALLER_BUCKET} in zero_optimization makes it smaller, '
        "with more and smaller collectives"
    ]


def _about_unused(chosen: WayRecord | None, effective_batch: int, ranks: int) -> list[str]:
    """A larger B than any that divides E / W."""
    if chosen is None or chosen.best is None or chosen.largest_micro_batch <= chosen.best.micro_batch:
        return []
    largest = chosen.largest_micro_batch
    if effective_batch % (ranks * largest) == 0:  # it fits in a window of two micro-steps alone, by a few bytes of data
        return []
    nearest = max(1, round(effective_batch / (ranks * largest))) * ranks * largest
    return [
        f"B = {largest} would fit too, but does not divide {effective_batch} / {ranks}; "
        f"--effective-batch {nearest} would use it"
    ]


def _about_fitting(chosen: WayRecord | None, others: Sequence[WayRecord]) -> list[str]:
    if chosen is not None:
        return []
    nearest = next((way for way in others if way.fits), None)
    if nearest is None:
        return ["none of these ways fits: that takes more memory, more ranks at ZeRO 3, or shorter samples"]
    return [f"nearest that fits: {'; '.join(nearest.changes)}"]
