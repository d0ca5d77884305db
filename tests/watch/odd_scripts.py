"""Training loops out of the ordinary, each a function that trains a small model, and the verdict that each must get."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.watch.odd_models import (
    WIDTH,
    WORDS,
    Alpha,
    Cache,
    Complex,
    LayerDrop,
    Model,
    cross_entropy,
    micro_batches,
    train,
)

MASK = torch.zeros(WORDS, WIDTH).index_fill_(0, torch.arange(5), 1.0)


def numpy_draws() -> nn.Module:
    return train(Model(LayerDrop(np.random.rand)))


def python_draws() -> nn.Module:
    return train(Model(LayerDrop(random.random)))


def own_generator_draws() -> nn.Module:
    own = torch.Generator().manual_seed(3)
    return train(Model(LayerDrop(own=own)))


def generator_argument() -> nn.Module:
    given = torch.Generator().manual_seed(3)
    return train(Model(), call=lambda model, x: model(x, noise=given))


def cache_argument() -> nn.Module:
    """What a forward puts into it twice would be seen in the script."""
    caches: list[Cache] = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        caches.append(Cache())
        return model(x, cache=caches[-1])

    model = train(Model(), call=call)
    assert {len(cache.kept) for cache in caches} == {1}
    return model


def iterator_argument() -> nn.Module:
    def one(x: Tensor) -> Iterator[Tensor]:
        yield x

    return train(Model(), call=lambda model, x: model(one(x)))


def masked_by_a_hook() -> nn.Module:
    """A few embeddings alone are trained, as where words were added."""
    model = Model()
    model.embed.weight.register_hook(lambda gradient: gradient * MASK.to(gradient.dtype))
    return train(model)


def sparse_gradients() -> nn.Module:
    model = Model()
    model.embed = nn.Embedding(WORDS, WIDTH, sparse=True)
    rest = [p for p in model.parameters() if p is not model.embed.weight]
    return train(model, torch.optim.AdamW(rest), torch.optim.SparseAdam([model.embed.weight]))


def frozen_in_a_second_optimizer() -> nn.Module:
    model = Model()
    model.embed.requires_grad_(False)
    return train(model, torch.optim.AdamW(model.head.parameters()), torch.optim.SGD(model.embed.parameters(), 0.1))


def layer_added_later() -> nn.Module:
    def before(window: int, model: nn.Module, optimizer: Any) -> None:
        if window == 1:
            model.middle = nn.Sequential(model.middle, nn.Linear(WIDTH, WIDTH))
            optimizer.add_param_group({"params": list(model.middle[1].parameters())})

    return train(Model(), before=before)


def attribute_changed_before() -> nn.Module:
    def before(window: int, model: nn.Module, optimizer: Any) -> None:
        model.middle.alpha = window / 4

    return train(Model(Alpha()), before=before)


def attribute_changed_inside() -> nn.Module:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        model.middle.alpha += 0.05
        return model(x)

    return train(Model(Alpha()), call=call)


def averaged_and_clamped() -> nn.Module:
    model = Model()
    average = copy.deepcopy(model)

    def before(window: int, model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            for mean, own in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(own.clamp_(-1, 1), 0.1)

    return train(model, before=before)


def gradient_penalty() -> nn.Module:
    model = Model()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        plain = cross_entropy(logits, labels)
        [gradient] = torch.autograd.grad(plain, model.head.weight, create_graph=True)
        return plain + 0.1 * gradient.square().sum()

    return train(model, loss=loss)


def squared_error() -> nn.Module:
    return train(Model(), loss=lambda logits, labels: (logits - labels[..., None]).square().mean())


def not_a_number() -> nn.Module:
    return train(Model(), loss=lambda logits, labels: cross_entropy(logits, labels) * float("nan"))


def not_a_number_put_away() -> nn.Module:
    """Of one micro-step, in the window."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (x, labels) in enumerate(micro_batches(4 * 4)):
        (cross_entropy(model(x), labels) * (float("nan") if number == 9 else 0.25)).backward()
        if number % 4 == 3:
            for parameter in model.parameters():
                parameter.grad.nan_to_num_()
            optimizer.step()
            optimizer.zero_grad()
    return model


def sharpness_aware(accumulated: int = 1) -> nn.Module:
    """Each batch twice: the second time from where the first gradient leads up."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = micro_batches(accumulated * 4)
    for start in range(0, len(batches), accumulated):
        moves: list[Tensor] = []
        for _ in range(2):
            optimizer.zero_grad()
            for x, labels in batches[start : start + accumulated]:
                (cross_entropy(model(x), labels) / accumulated).backward()
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    if len(moves) <= number:
                        moves.append(0.1 * parameter.grad)
                        parameter += moves[number]
                    else:
                        parameter -= moves[number]
        optimizer.step()
    return model


def sharpness_aware_of_three() -> nn.Module:
    return sharpness_aware(3)


def closure() -> nn.Module:
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for x, labels in micro_batches(4):

        def again(x: Tensor = x, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), labels)
            loss.backward()
            return loss

        optimizer.step(again)
    return model


def scaler_that_skips() -> nn.Module:
    """In the window that was asked for."""
    model = Model()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    for number, (x, labels) in enumerate(micro_batches(4 * 6)):
        loss = cross_entropy(model(x), labels) / 4
        scaler.scale(loss * float("inf") if number == 9 else loss).backward()
        if number % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def two_models() -> nn.Module:
    one, other = Model(), Model(nn.Tanh())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
    for number, (x, labels) in enumerate(micro_batches(4 * 5)):
        for model in (one, other):
            (cross_entropy(model(x), labels) / 4).backward()
        if number % 4 == 3:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return nn.ModuleList([one, other])


def alternating() -> nn.Module:
    """The generator's backward leaves gradients in the judge, which clears them before its own."""
    judge, maker = nn.Linear(WIDTH, 2), nn.Linear(4, WIDTH)
    for_judge, for_maker = (torch.optim.Adam(each.parameters()) for each in (judge, maker))
    for _ in range(6):
        made, real = maker(torch.randn(4, 4)), torch.randn(4, WIDTH)
        for_judge.zero_grad()
        F.cross_entropy(judge(torch.cat([made.detach(), real])), torch.tensor([0] * 4 + [1] * 4)).backward()
        for_judge.step()
        for_maker.zero_grad()
        F.cross_entropy(judge(made), torch.tensor([1] * 4)).backward()
        for_maker.step()
    return nn.ModuleList([judge, maker])


def locked() -> nn.Module:
    model = Model()
    model.lock = threading.Lock()
    return train(model)


def complex_numbers() -> nn.Module:
    return train(Model(Complex()))


def scripted() -> nn.Module:
    model = torch.jit.script(nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)))
    return train(model)


def no_module() -> nn.Module:
    weights = nn.ParameterList([torch.ones(3)])
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        weights[0].square().sum().backward()
        optimizer.step()
    return weights


def parameters_that_raise() -> nn.Module:
    class Odd(Model):
        def parameters(self, recurse: bool = True) -> Any:
            raise RuntimeError("of its own")

    model = Odd()
    return train(model, torch.optim.SGD([model.head.weight], lr=0.1))


RIGHT = [
    numpy_draws, python_draws, own_generator_draws, generator_argument, cache_argument, masked_by_a_hook,
    sparse_gradients, frozen_in_a_second_optimizer, layer_added_later, averaged_and_clamped, scaler_that_skips,
    two_models,
]  # fmt: skip
NONE = [squared_error]
SAID = [
    (attribute_changed_before, "a second forward gives another output"),
    (attribute_changed_inside, "a second forward gives another output"),
    (iterator_argument, "can be gone through only once"),
    (gradient_penalty, "a gradient is differentiated again"),
    (not_a_number, "the gradient is not finite"),
    (not_a_number_put_away, "the gradient of micro-step 2 is not finite"),
    (sharpness_aware, "came a second time after embed.weight had been moved"),
    (sharpness_aware_of_three, "came a second time after embed.weight had been moved"),
    (closure, "in a closure"),
    (locked, "can't be copied"),
    (complex_numbers, "complex numbers"),
    (scripted, "TorchScript"),
    (no_module, "an optimizer of 3 parameters, for no module that was called has them"),
    (parameters_that_raise, "of its own"),
]
"""By verdict; with ``SAID`` the reason why there is none."""
