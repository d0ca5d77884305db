"""A sketch is linear, keeps inner products on average, and recovers weights as whole gradients do.

Run: pytest tests/verification/test_sketch.py. Not covered: a GPU.

Deviations: E<sketch x, sketch y> = <x, y> with variance at most (||x||^2 ||y||^2 + <x, y>^2) / d. So a squared norm
deviates by sqrt(2 / d), relatively.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dsaccum.reference import Reference
from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.sketch import CHUNK, GradientSketch, norms
from dsaccum.verification.comparison.weights import recover_robustly
from tests.cases import VOCABULARY, tiny_gpt
from tests.verification.planted import weighted_sum

DIMENSION = 1024
ODD = 3 * CHUNK // 2 + 7
"""More than one chunk, and not a whole number of them."""


def sketch_of(tensor: Tensor, *, name: str = "a", dimension: int = DIMENSION) -> Tensor:
    return GradientSketch({name: tensor.shape}, whole_limit=0, dimension=dimension)({name: tensor})[name]


def random(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_linear() -> None:
    """Sums of float64 in another order: 1e-15 times the square root of what lands in a bucket."""
    x, y = random(ODD, 0).double(), random(ODD, 1).double()
    expected = 0.25 * sketch_of(x) - 3 * sketch_of(y)
    torch.testing.assert_close(sketch_of(0.25 * x - 3 * y), expected, rtol=0, atol=1e-12)


def test_every_element_lands_once_with_a_fair_sign_in_a_fair_bucket() -> None:
    """A unit vector's sketch is one +-1. Over n elements, counts stay within 5 deviations."""
    size = 2000
    shapes = {"a": torch.Size([size])}
    sketch = GradientSketch(shapes, whole_limit=0, dimension=16)
    landed = torch.stack([sketch({"a": row})["a"] for row in torch.eye(size)])
    assert (landed.abs().sum(dim=1) == 1).all()
    assert abs(float(landed.sum())) < 5 * math.sqrt(size)
    expected = size / 16
    assert float((landed.abs().sum(dim=0) - expected).abs().max()) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("kind", ["random", "constant", "alternating", "few", "outer product"])
def test_squared_norms_are_unbiased(kind: str) -> None:
    """The mean over 64 names (64 seeds), within 4 of its deviations; and the deviation itself, within a half.

    Structured gradients too: a hash that follows the structure would add up what should cancel.
    """
    rows, columns = 257, 96
    size, seeds = rows * columns, 64
    x = {
        "random": random(size, 0),
        "constant": torch.ones(size),
        "alternating": torch.ones(size).cumsum(0) % 2 - 0.5,
        "few": random(size, 0) * (random(size, 1) > 3),
        "outer product": torch.outer(random(rows, 0), random(columns, 1)).flatten(),
    }[kind]
    squares = (
        torch.stack([sketch_of(x, name=f"p{seed}").square().sum() for seed in range(seeds)]) / x.double().norm() ** 2
    )
    deviation = math.sqrt(2 / DIMENSION)
    assert abs(float(squares.mean()) - 1) < 4 * deviation / math.sqrt(seeds)
    assert float(squares.std()) < 1.5 * deviation


def test_every_chunk_has_hashes_of_its_own() -> None:
    """Were they the same, two equal chunks would add up: a squared norm twice too large. Within 5 deviations."""
    square = float(sketch_of(torch.ones(2 * CHUNK)).square().sum()) / (2 * CHUNK)
    assert abs(square - 1) < 5 * math.sqrt(2 / DIMENSION)


def test_small_tensors_are_kept_whole_and_exact() -> None:
    shapes = {"weight": torch.Size([64, 32]), "bias": torch.Size([32])}
    gradient = {"weight": random(2048, 0).reshape(64, 32).bfloat16(), "bias": random(32, 1).double()}
    everything = GradientSketch(shapes, whole_limit=2080, dimension=1024)(gradient)
    assert (everything["weight"].dtype, everything["bias"].dtype) == (torch.float32, torch.float64)
    assert torch.equal(everything["weight"], gradient["weight"].float().flatten())
    assert torch.equal(everything["bias"], gradient["bias"])
    small = GradientSketch(shapes, whole_limit=2079, dimension=1024)(gradient)
    assert (small["weight"].shape, small["weight"].dtype) == ((1024,), torch.float64)
    assert torch.equal(small["bias"], gradient["bias"])


def test_a_copy_is_kept() -> None:
    live = torch.ones(4)
    kept = GradientSketch({"a": live.shape}, whole_limit=4)({"a": live})
    live.zero_()
    assert kept["a"].tolist() == [1.0] * 4


def test_absent_means_zero() -> None:
    shapes = {"a": torch.Size([5000]), "b": torch.Size([3]), "c": torch.Size([])}
    reduced = GradientSketch(shapes, whole_limit=0)({"a": None})
    assert {name: tuple(vector.shape) for name, vector in reduced.items()} == {"a": (4096,), "b": (3,), "c": (1,)}
    assert set(norms(reduced).values()) == {0.0}
    assert norms({"a": None, "b": torch.tensor([3.0, 4.0])}) == {"a": 0.0, "b": 5.0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = random(5000, 0)
    x[[7, 4000]] = value
    assert not sketch_of(x).isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    sketch = GradientSketch({"a": torch.Size([3])}, whole_limit=0)
    with pytest.raises(ValueError, match="1 tensors have no known shape: b"):
        sketch({"b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"a is \[4\], not \[3\]"):
        sketch({"a": torch.ones(4)})
    with pytest.raises(ValueError, match="a power of two, not 4000"):
        GradientSketch({}, whole_limit=0, dimension=4000)


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.0, 0.0, 0.0, 1.0], [0.25, 0.25, 0.25 * 1.001, 0.25]])
def test_a_sketch_recovers_weights_as_whole_gradients_do(weights: list[float]) -> None:
    """A real model in float32, its wider tensors sketched 16 to 1: both within 2.5e-7, and a thousandth is seen."""
    model = tiny_gpt()
    assert isinstance(model, nn.Module)
    reference = Reference(model, dtype=torch.float32)
    tokens = torch.randint(VOCABULARY, (16, 16), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": part, "labels": part} for part in tokens.split(4)]
    columns = [reference.measure(row, scale=1 / 60).gradient for row in rows]
    gradient = {n: sum(w * c[n] for w, c in zip(weights, columns, strict=True)) for n in columns[0]}
    sketch = GradientSketch({n: t.shape for n, t in gradient.items()}, whole_limit=0, dimension=64)
    whole = recover_robustly(Factors(gradient, columns))
    small = recover_robustly(Factors(sketch(gradient), [sketch(column) for column in columns]))
    for found in (whole, small):
        assert found.weights == [pytest.approx(w, abs=2.5e-7) for w in weights]
        assert found.outliers == []
    assert len({tuple(sketch(gradient)[n].shape) for n in gradient}) > 1  # some were kept whole, some sketched


def test_four_thousand_numbers_do_for_a_large_tensor() -> None:
    """The dimension that is used, on tensors 73 and 24 times as large: within 2.5e-7, as the whole ones."""
    sizes = {"a": 300_000, "b": 100_000, "c": 700}
    common, *own = [{n: random(s, 10 * seed + i) for i, (n, s) in enumerate(sizes.items())} for seed in range(9)]
    columns = [{name: common[name] + part[name] for name in sizes} for part in own]
    weights = [0.125] * 7 + [0.125 * 1.001]
    gradient = weighted_sum(weights, columns)
    sketch = GradientSketch({name: torch.Size([size]) for name, size in sizes.items()}, whole_limit=0)
    whole = recover_robustly(Factors(gradient, columns))
    small = recover_robustly(Factors(sketch(gradient), [sketch(column) for column in columns]))
    for found in (whole, small):
        assert found.weights == [pytest.approx(w, abs=2.5e-7) for w in weights]
    assert small.residual == pytest.approx(whole.residual or 0.0, rel=0.1)  # 5 deviations of the norm of two sketches


def test_sketches_of_different_seeds_do_not_mix() -> None:
    """The control: were signs and buckets not the same for gradient and columns, the weight would be noise."""
    x = random(ODD, 0)
    mixed = Factors({"a": sketch_of(x, name="a")}, [{"a": sketch_of(x, name="b")}])
    assert abs(recover_robustly(mixed).weights[0] or 0.0) < 0.2
    same = Factors({"a": sketch_of(x)}, [{"a": sketch_of(x)}])
    assert recover_robustly(same).weights[0] == pytest.approx(1.0, abs=1e-12)
