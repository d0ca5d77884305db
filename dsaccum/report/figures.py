"""Figures as people read them: few digits, aligned, and legible however small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOT_MEASURED = "-"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def is_or_are(number: int) -> str:
    """1 micro-batch is, 2 are."""
    return "is" if number == 1 else "are"


def scientific(number: float | None) -> str:
    """``2.1e-07``; zero is ``0``."""
    if number is None:
        return NOT_MEASURED
    return f"{number:.1e}" if number else "0"


def against(error: float | None, bound: float | None) -> str:
    """``2.1e-07 / 1.3e-06``: an error and the bound that it has to keep."""
    return NOT_MEASURED if error is None else f"{scientific(error):>7} / {scientific(bound)}"


def error_and_bound(error: float | None, bound: float | None) -> str:
    """``2.1e-07, bound 1.3e-06``: the same where no heading says which is which."""
    return NOT_MEASURED if error is None else f"{scientific(error)}, bound {scientific(bound)}"


def exceeds(error: float | None, bound: float | None) -> bool:
    """Whether an error is outside its bound. A record has no infinity: a bound without an error says that."""
    return bound is not None and (error is None or error > bound)


def ratio(number: float | None) -> str:
    """``0.9999``; what four decimals cannot show is scientific."""
    if number is None:
        return NOT_MEASURED
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e3 else scientific(number)


def plain(number: float | None, decimals: int) -> str:
    """A loss or a norm: ``5.847091``; very small and very large ones are scientific."""
    if number is None:
        return NOT_MEASURED
    return f"{number:.{decimals}f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.{decimals - 2}e}"


def size(amount: int | None) -> str:
    """Bytes: ``12 bytes``, ``7.1 MiB``."""
    if amount is None:
        return NOT_MEASURED
    if amount < 1024:
        return counted(amount, "byte")
    value, unit = amount / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def ranges(numbers: Iterable[int]) -> str:
    """``1 to 3, 5``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """``step 1``, ``steps 1 to 3``."""
    return f"{noun} {ranges(numbers)}" if len(numbers) == 1 else f"{noun}s {ranges(numbers)}"


def middle_left_out(count: int, most: int, keep: Iterable[int] = ()) -> list[int | None]:
    """Indices from 0 to ``count`` - 1, at most ``most``: the ends, and of ``keep`` the first; None marks a gap."""
    if count <= most:
        return list(range(count))
    wanted = set(list(keep)[: most // 2])
    from_both_ends = (index for pair in zip(range(count), reversed(range(count)), strict=True) for index in pair)
    while len(wanted) < most:
        wanted.add(next(from_both_ends))
    shown: list[int | None] = []
    before = -1
    for index in [*sorted(wanted), count]:
        shown += [index] if index == before + 1 else [None, index]
        before = index
    return shown[:-1]
