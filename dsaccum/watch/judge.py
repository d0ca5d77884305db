"""A watched window against what it had to be: which token weighed how much, and what became of it on the way.

With s_t what arrives at token t's logits in micro-batch i, a_i = sum_t s_t, g_i the gradient recomputed from what
arrived, and G what the optimizer was about to get:

    recovered   G = sum_i u_i (g_i / a_i):    u_i is the weight of micro-batch i's own mean gradient
    due         u_i = n_i / n, its targets over those of the window on all ranks
    two factors u_i = a_i v_i:  a_i is what script and engine made of the loss, v_i what accumulation and reduction did;
                1 / W is due to v_i, or c / W where a script multiplied everything by c after backward: unscaled it, or
                divided a sum by its tokens. Whether c is right, the tokens say
    tokens      w_t = v_i s_t,  1 / n is due

Where no tokens can be read, only v_i is judged. Bounds are those of ``verify``; the loss's own scale is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from dsaccum.verification.comparison.evidence import Counts
from dsaccum.verification.comparison.gradient_check import GradientCheck, check_gradient
from dsaccum.verification.comparison.sketch import GradientSketch
from dsaccum.verification.comparison.truth import WindowTruth
from dsaccum.verification.comparison.update_check import SawCheck, UpdateCheck
from dsaccum.watch.common_factor import common_factor
from dsaccum.watch.optimizer_rule import check_optimizer, clipped, passes_with
from dsaccum.watch.token_weights import Tokens, token_weights
from dsaccum.watch.tokens import TokenReading
from dsaccum.watch.window import RunFacts, Vectors, WatchedWindow
from dsaccum.watch.window_truth import Matrix, WatchedBatch, WatchedCase, window_truth


@dataclass(frozen=True)
class Judged:
    """One window, compared.

    Attributes:
        window: what was seen.
        counts: of tokens (or rows, where there are none), [N][W].
        arriving: a_i, [N][W].
        engine: the engine's part of it, [N][W].
        passing: v_i by rank that got it, [W][N][W]; None where it can't be told.
        way: from the micro-batches' losses to the optimizer, by rank: are all v_i c / W? Its columns are scaled so that
            n_i / n is due to each.
        factor: c, where that is another than 1.
        weighting: with the weights that targets are due, by rank; None where no tokens could be read.
        truths: of both, by the same names.
        tokens: None likewise; then ``unreadable`` says why.
        saw: what reached the optimizer.
        update: what it made of it.
        update_reason: why that is not told.
        count_offset: what Adam's count is ahead by, where that explains a wrong update.
        vectors: each rank's gradient.
        past_outputs: what the micro-batches' gradients were taken to hold beside what came through the outputs.
    """

    window: WatchedWindow
    counts: Counts
    arriving: Matrix
    engine: Matrix
    passing: list[list[list[float | None]]]
    way: list[GradientCheck]
    factor: float | None
    weighting: list[GradientCheck] | None
    way_truth: WindowTruth
    weighting_truth: WindowTruth | None
    tokens: Tokens | None
    unreadable: str | None
    saw: SawCheck | None
    update: UpdateCheck | None
    update_reason: str | None
    count_offset: int | None
    case: Any
    vectors: list[Vectors] = field(default_factory=list)
    past_outputs: str | None = None

    @property
    def explained(self) -> bool:
        """Some weights account for every rank's gradient: only then do tokens have any."""
        return all(check.explained for check in self.weighting or self.way)

    @property
    def facts(self) -> RunFacts:
        """Of the run."""
        return self.window.facts


def judge_as_run(window: WatchedWindow) -> Judged:
    """Compare.

    Raises:
        ValueError: the ranks made different numbers of micro-steps, or none.
    """
    ranks, steps, world = window.ranks, window.micro_steps, len(window.ranks)
    if any(len(rank.columns) != steps for rank in ranks):
        made = ", ".join(str(len(rank.columns)) for rank in ranks)
        raise ValueError(f"the ranks made different numbers of micro-steps: {made}")
    if not steps:
        raise ValueError("no gradient arrived at any output of the module that was watched")
    facts = window.facts
    limits = [clip.limit for rank in ranks for clip in rank.clips]
    case = WatchedCase(
        facts.precision,
        facts.accumulation_dtype,
        facts.communication_dtype,
        WatchedBatch(steps, world),
        facts.clipping or max(limits, default=0.0),
    )
    readings = [[ranks[r].tokens[k] for r in range(world)] for k in range(steps)]
    unreadable = _unreadable(readings)
    counts = _counts(readings, ranks, steps) if unreadable is None else _rows(ranks, steps)
    arriving = [[_arriving(readings[k][r], ranks[r].seeds[k]) for r in range(world)] for k in range(steps)]
    scale = [[a if a > 0 else 1.0 for a in row] for row in arriving]
    shapes = {name: tensor.shape for name, tensor in ranks[0].gradient.items()}
    sketch = GradientSketch(shapes, whole_limit=sum(shape.numel() for shape in shapes.values()))

    def checks(scale: Matrix, due: Matrix) -> tuple[WindowTruth, list[GradientCheck]]:
        columns = [_divided(ranks[r].columns[k], scale[k][r]) for k in range(steps) for r in range(world)]
        exact = [_divided(ranks[r].truths[k], scale[k][r]) for k in range(steps) for r in range(world)]
        truth = window_truth(case, columns, exact, due, counts.targets)
        return truth, [check_gradient(cast(Any, case), truth, sketch, rank.gradient) for rank in ranks]

    shares = _shares(counts.targets)
    as_arrived = [[world * share for share in row] for row in shares]
    way_truth, way = checks(as_arrived, shares)
    factor = common_factor(way, shares) if facts.zero_stage is None else None  # a script has no hand in an engine's
    if factor is not None:
        way_truth, way = checks(as_arrived, [[factor * share for share in row] for row in shares])
    weighting_truth, weighting = None, None
    tokens = None
    passing = [_passing(check, shares, world) for check in way]
    if unreadable is None:
        total = max(sum(map(sum, counts.targets)), 1)
        weighting_truth, weighting = checks(scale, [[n / total for n in row] for row in counts.targets])
        tokens = token_weights(cast(list[list[TokenReading]], readings), passing[0], world)
        # a_i is read off the logits' gradients, each rounded.
        weighting = [replace(check, tolerance=check.tolerance + tokens.tolerance) for check in weighting]
    by_script = ranks[0].coefficients
    stepped, rule_facts = clipped(ranks[0].step, by_script), facts
    if by_script is not None:
        rule_facts = replace(facts, clipping=0.0)  # it is done
    saw, update, reason = check_optimizer(stepped, rule_facts, facts.updates_before)
    count_offset = None
    if update is not None and not update.passed:
        count_offset = next((off for off in (1, -1, 2) if passes_with(stepped, rule_facts, off)), None)
    return Judged(
        window=window,
        counts=counts,
        arriving=arriving,
        engine=[[_at(ranks[r].engine, k) for r in range(world)] for k in range(steps)],
        passing=passing,
        way=way,
        factor=factor,
        weighting=weighting,
        way_truth=way_truth,
        weighting_truth=weighting_truth,
        tokens=tokens,
        unreadable=unreadable,
        saw=saw,
        update=update,
        update_reason=reason,
        count_offset=count_offset,
        case=case,
        vectors=[rank.gradient for rank in ranks],
    )


def _unreadable(readings: list[list[TokenReading | None]]) -> str | None:
    flat = [each for row in readings for each in row]
    if any(each is None for each in flat):
        return "the module gives no logits that a gradient reaches"
    return next((each.reason for each in flat if each is not None and each.reason), None)


def _counts(readings: list[list[TokenReading | None]], ranks: list[Any], steps: int) -> Counts:
    def of(field_of: Any) -> list[list[int]]:
        return [[field_of(each) for each in row] for row in readings]

    return Counts(
        targets=of(lambda each: each.due),
        labels=of(lambda each: each.before_shift),
        positions=of(lambda each: each.positions),
        samples=of(lambda each: each.rows),
        rows=of(lambda each: each.all_rows),
    )


def _rows(ranks: list[Any], steps: int) -> Counts:
    rows = [[max(rank.rows[k], 1) for rank in ranks] for k in range(steps)]
    return Counts(targets=rows, labels=rows, positions=rows, samples=rows, rows=rows)


def _arriving(reading: TokenReading | None, seed: float | None) -> float:
    if reading is not None and reading.reason is None:
        return reading.sum
    return abs(seed) if seed else 1.0


def _divided(vectors: Vectors, scale: float) -> Vectors:
    return {name: tensor.double() / scale for name, tensor in vectors.items()}


def _shares(targets: list[list[int]]) -> Matrix:
    """n_i / n; a micro-batch without targets counts as one, for a gradient that it gives all the same."""
    counts = [[max(n, 1) for n in row] for row in targets]
    total = sum(map(sum, counts))
    return [[n / total for n in row] for row in counts]


def _passing(check: GradientCheck, shares: Matrix, world: int) -> list[list[float | None]]:
    """v_i: a share of 1 / W each, times what its weight is over what is due to it."""
    weights = check.recovered.weights
    return [
        [None if (w := weights[k * world + r]) is None else w / shares[k][r] / world for r in range(world)]
        for k in range(len(shares))
    ]


def _at(values: list[float], k: int) -> float:
    return values[k] if k < len(values) else 1.0
