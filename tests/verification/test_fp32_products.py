"""fp32 products that a user's settings round are computed in full while a case runs, and their cost is measured.

Run: pytest -n 0 tests/verification/test_fp32_products.py. Not covered: a GPU, where TF32 really rounds (marked gpu).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsaccum.verification.fp32_products import full_products, products_as, rounds
from dsaccum.verification.ranks.pools import RankPools
from tests.verification.verifying import Given

FACTORY = Path(__file__).parent / "rounded_products.py"


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("asked", ["highest", "high", "medium"])
def test_settings_are_put_back(asked: str) -> None:
    torch.set_float32_matmul_precision(asked)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with full_products() as found:
        assert matmul.fp32_precision == "ieee"
        assert found["cuda.matmul"] == before
        with products_as(found):
            assert matmul.fp32_precision == before
        assert matmul.fp32_precision == "ieee"
    assert (matmul.fp32_precision, torch.get_float32_matmul_precision()) == (before, asked)
    assert rounds({"matmul": asked}) == (asked != "highest")


def test_rounded_products_are_named_and_take_no_part(tmp_path: Path, rank_pool: RankPools) -> None:
    given = Given(experiment={"model": {"factory": f"{FACTORY}:model"}})
    record = given.verify(tmp_path, rank_pool)
    assert record.verdict == "equivalent", record.reasons
    [said] = [line for line in record.substitutions if line.startswith("fp32 products are computed in full")]
    cost = float(said.split(" by ")[1].split()[0])
    assert 1e-6 < cost < 1e-2


def test_nothing_is_said_where_nothing_is_rounded(tmp_path: Path, rank_pool: RankPools) -> None:
    assert not any("fp32 products" in line for line in Given().verify(tmp_path, rank_pool).substitutions)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tf32_rounds_on_a_gpu() -> None:
    torch.set_float32_matmul_precision("high")
    square = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with full_products() as found:
        full = square @ square
        with products_as(found):
            rounded = square @ square
    assert 1e-5 < float((rounded - full).norm() / full.norm()) < 1e-2
