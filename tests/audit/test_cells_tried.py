"""What DeepSpeed does is told from its behaviour, on real ranks: facts of 0.19.8, and wrong ways that were planted.

Run: pytest -n 0 tests/audit/test_cells_tried.py. The facts are DeepSpeed's: when it mends one, its test here fails and
docs/audit.md is out of date. Controls: the same way where it is right. Not covered: the whole matrix (test_whole.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsaccum.audit import run, ways
from dsaccum.audit.cells import Cell, Circumstances
from dsaccum.audit.record import AuditRecord, CellRecord
from dsaccum.audit.run import run_audit
from dsaccum.audit.ways import Way
from dsaccum.config.errors import ConfigError
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.pools import RankPools

pytestmark = pytest.mark.distributed


def audit(pools: RankPools, *cells: Cell, **options: Any) -> AuditRecord:
    return run_audit(SilentProgress(), cells=cells, ranks=2, pools=pools, **options)


def tried(pools: RankPools, way: str, stage: int = 0, **circumstances: Any) -> CellRecord:
    [cell] = audit(pools, Cell(way, Circumstances(stage, **circumstances))).cells
    return cell


def plant(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """A way that only this test knows; the ranks find it by its module."""
    monkeypatch.setitem(ways.WAYS, name, Way(name, "planted", f"tests.audit.planted:{name}", **changes))


@pytest.mark.slow
def test_a_plain_loop_is_right(rank_pool: RankPools) -> None:
    cell = tried(rank_pool, "own-loss", 1)
    assert (cell.outcome, cell.causes, cell.detail) == ("right", [], "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "stage", "circumstances", "causes"),
    [
        ("scale-wrt-gas-false", 0, {}, ["loss-scaled-twice"]),  # fact 3
        ("scaled-backward", 1, {}, ["loss-scaled-twice"]),  # fact 4
        ("own-loss", 1, {"clipping": "absent"}, ["clipping-mismatch"]),  # fact 5
        ("own-loss", 0, {"precision": "bf16"}, ["optimizer-count-offset"]),  # fact 8
        ("short-window", 0, {}, ["boundary-shifted"]),  # fact 15
        ("no-sync", 0, {}, ["boundary-shifted"]),  # fact 17
    ],
)
def test_what_it_gets_wrong_is_named(
    rank_pool: RankPools, way: str, stage: int, circumstances: dict[str, Any], causes: list[str]
) -> None:
    cell = tried(rank_pool, way, stage, **circumstances)
    assert (cell.outcome, cell.causes, cell.certain) == ("wrong", causes, True), cell.detail


@pytest.mark.slow
def test_two_backward_calls_keep_the_last_one(rank_pool: RankPools) -> None:
    """Fact 16. At ZeRO 1 nothing is left of the window but half of its last micro-batch."""
    cell = tried(rank_pool, "two-backwards", 1)
    assert (cell.outcome, cell.certain) == ("wrong", False), "half of it: by the calls, or by an average over ranks"
    assert "only-last-micro-batch" in cell.causes
    assert cell.weights == "micro-steps weigh 0, 0, 0, 1/2 of what is due"


@pytest.mark.slow
def test_the_flag_works_at_zero_1(rank_pool: RankPools) -> None:
    """Control of the first fact, and of how the loss is formed there."""
    assert tried(rank_pool, "scale-wrt-gas-false", 1).outcome == "right"


@pytest.mark.parametrize(
    ("name", "causes"),
    [("divides_once_more", ["loss-scaled-twice"]), ("forgets_a_micro_batch", ["micro-batch-dropped"])],
)
def test_a_wrong_way_is_called_wrong(
    rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch, name: str, causes: list[str]
) -> None:
    plant(monkeypatch, name)
    cell = tried(rank_pool, name)
    assert (cell.outcome, cell.causes) == ("wrong", causes)


def test_refusals_are_told_in_deepspeeds_words_and_the_ranks_stay(
    rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "raises_in_deepspeed")
    plant(monkeypatch, "asks_for_what_is_not_there")
    cells = [Cell(way, Circumstances(2)) for way in ("no-sync", "raises_in_deepspeed", "asks_for_what_is_not_there")]
    team = rank_pool.get(2)._team
    record = audit(rank_pool, *cells, Cell("own-loss", Circumstances(2)))
    assert rank_pool.get(2)._team is team
    assert [cell.outcome for cell in record.cells] == ["refused", "refused", "refused", "right"]
    details = [cell.detail for cell in record.cells]
    assert details[0].startswith("AssertionError: no_sync context manager is incompatible")
    assert "loss must be a scalar tensor" in details[1]
    assert details[2] == "this DeepSpeed has no engine.a_method_of_tomorrow"


def test_a_key_that_deepspeed_does_not_know_is_refused_not_ignored(
    rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "divides_once_more", config={"a_key_of_tomorrow": True})
    cell = tried(rank_pool, "divides_once_more")
    assert (cell.outcome, cell.detail) == ("refused", "this DeepSpeed has no a_key_of_tomorrow")


@pytest.mark.slow
def test_where_only_we_stumble_there_is_no_verdict(rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """At ZeRO 1 there is no reduced gradient to read so early. Without capture, DeepSpeed has the word."""
    plant(monkeypatch, "cannot_be_watched")
    plant(monkeypatch, "raises_watched_or_not")
    first, second = (tried(rank_pool, way, 1) for way in ("cannot_be_watched", "raises_watched_or_not"))
    assert first.outcome == "untested"
    assert first.detail.startswith("what DeepSpeed did could not be observed: RuntimeError: no reduced gradient")
    assert (second.outcome, "loss must be a scalar tensor" in second.detail) == ("refused", True)


@pytest.fixture
def few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {way: ways.WAYS[way] for way in ("own-loss", "outside-loss", "no-sync")}
    monkeypatch.setattr(run, "WAYS", kept)


@pytest.mark.usefixtures("few_ways")
@pytest.mark.slow
def test_the_users_own_config(rank_pool: RankPools, tmp_path: Path, repository: Path) -> None:
    good = audit(rank_pool, deepspeed=repository / "ds_configs/accum4.json").own
    assert good is not None
    assert good.good is True
    assert [cell.outcome for cell in good.cells] == ["right", "right", "wrong"]
    without_clipping = tmp_path / "ds.json"
    text = (repository / "ds_configs/accum4.json").read_text()
    lines = [line for line in text.splitlines() if "gradient_clipping" not in line]
    assert len(lines) == len(text.splitlines()) - 1
    without_clipping.write_text("\n".join(lines))
    bad = audit(rank_pool, deepspeed=without_clipping).own
    assert bad is not None
    assert (bad.good, bad.circumstances.clipping) == (False, "absent")
    assert bad.cells[0].causes == ["clipping-mismatch"]


def test_wrong_input_is_the_users(rank_pool: RankPools, tmp_path: Path) -> None:
    misspelt = tmp_path / "ds.json"
    misspelt.write_text('{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_step": 4}')
    with pytest.raises(ConfigError, match=r"ds\.json"):
        audit(rank_pool, deepspeed=misspelt)
    with pytest.raises(ConfigError, match="--ranks"):
        run_audit(SilentProgress(), ranks=0, pools=rank_pool)
