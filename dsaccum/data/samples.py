"""Samples: what one row of a batch is made of, and which of them training never sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import DataConfig
from dsaccum.data.documents import Document, Documents
from dsaccum.data.tokens import Tokenizer

NOT_A_TARGET: Final = -100
"""Label of a position that doesn't count in the loss."""

_HELD_OUT_FRACTION: Final = 20  # one in so many
_FEWEST_DOCUMENTS: Final = 20  # with fewer, one document is too large a part of the corpus to hold out


@dataclass(frozen=True)
class Samples:
    """Samples with random access, stored as ranges of one flat array of ids.

    ``samples[i]`` is ``(input_ids, labels)``: two int64 arrays of the same length, at most ``sequence_length``.
    The label of position t is ``input_ids[t]``, or -100 where it's no target; the causal shift is the loss's, which
    reads ``labels[1:]``. Every sample has at least one target after that shift.

    Args:
        tokens: ids, [tokens], in the smallest integer type that holds the vocabulary.
        starts: where each sample begins in ``tokens``, [samples].
        lengths: tokens of each sample, [samples].
        prompt_lengths: tokens of each sample that are context only, [samples].
        sequence_length: the longest that a sample can be.
        padded: whether lengths differ, so that batches need padding and an attention mask.
        dropped_tokens: tokens of the documents that are in no sample: what was cut off or left over.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    sequence_length: int
    padded: bool
    dropped_tokens: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start = self.starts[index]
        input_ids = self.tokens[start : start + self.lengths[index]].astype(np.int64)
        labels = input_ids.copy()
        labels[: self.prompt_lengths[index]] = NOT_A_TARGET
        return input_ids, labels

    def part(self, chosen: slice | np.ndarray) -> Samples:
        """Some of the samples, by slice or by mask; the ids are shared, not copied."""
        return replace(
            self,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            prompt_lengths=self.prompt_lengths[chosen],
        )


class Split(NamedTuple):
    """Samples to train on, samples that training never sees, and whether whole documents were held out."""

    training: Samples
    held_out: Samples
    by: Literal["document", "sample"]


def build_samples(documents: Sequence[Document], tokenizer: Tokenizer, config: DataConfig) -> Samples:
    """Make every sample of the documents; there may be none.

    ``packed``: documents, each with an end token, form one stream that is cut into samples of exactly
    ``sequence_length``; the remainder is dropped. ``padded``: one document with its end token per sample, cut at
    ``sequence_length``; a prompt's labels are -100, and samples without any target are left out.
    """
    tokens, lengths, prompt_lengths = _tokenize(documents, tokenizer)
    limit = config.sequence_length
    if config.packing == "packed":
        count = len(tokens) // limit
        starts = np.arange(count) * limit
        prompt_lengths = np.zeros(count, np.int64)
        lengths = np.full(count, limit)
    else:
        starts = np.cumsum(lengths) - lengths
        lengths = np.minimum(lengths, limit)
    samples = Samples(tokens, starts, lengths, prompt_lengths, limit, config.packing == "padded", 0)
    # Targets after the shift: position 0 is nobody's target, whether or not it belongs to a prompt.
    samples = samples.part(lengths > np.maximum(prompt_lengths, 1))
    return replace(samples, dropped_tokens=len(tokens) - int(samples.lengths.sum()))


def split_held_out(documents: Documents, tokenizer: Tokenizer, config: DataConfig, source_file: str | Path) -> Split:
    """Make the samples and set one in twenty aside, the same ones whatever any seed is.

    From 20 different documents on, those with the smallest sha256 are held out, so that no document, nor a copy of
    it, is on both sides. With fewer, or where that leaves a side empty, it's the last samples.

    Raises:
        ConfigError: fewer than two samples, or a shape in which nothing could be a target.
    """
    _refuse_impossible_shape(config, source_file)
    if (held := _held_out_documents(documents)).any():
        training = build_samples(_chosen(documents, ~held), tokenizer, config)
        held_out = build_samples(_chosen(documents, held), tokenizer, config)
        if len(training) and len(held_out):
            return Split(training, held_out, "document")
    samples = build_samples(documents.items, tokenizer, config)
    if len(samples) < 2:
        raise _too_small(samples, config, source_file)
    cut = len(samples) - max(1, len(samples) // _HELD_OUT_FRACTION)
    return Split(samples.part(slice(cut)), samples.part(slice(cut, None)), "sample")


def _tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ids with an end token after each document [tokens], documents' lengths and prompts' lengths [documents]."""
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    end = np.array([tokenizer.end_token], dtype)
    pieces: list[np.ndarray] = [np.empty(0, dtype)]
    lengths = np.empty(len(documents), np.int64)
    prompt_lengths = np.empty(len(documents), np.int64)
    for index, document in enumerate(documents):
        prompt = tokenizer.encode(document.prompt).astype(dtype)
        target = tokenizer.encode(document.target).astype(dtype)
        pieces += [prompt, target, end]
        prompt_lengths[index] = len(prompt)
        lengths[index] = len(prompt) + len(target) + 1
    return np.concatenate(pieces), lengths, prompt_lengths


def _held_out_documents(documents: Documents) -> np.ndarray:
    different = sorted(set(documents.digests))
    if len(different) < _FEWEST_DOCUMENTS:
        return np.zeros(len(documents), bool)
    last_held_out = different[len(different) // _HELD_OUT_FRACTION - 1]
    return np.array([digest <= last_held_out for digest in documents.digests])


def _chosen(documents: Documents, mask: np.ndarray) -> list[Document]:
    return [document for document, is_chosen in zip(documents.items, mask, strict=True) if is_chosen]


def _refuse_impossible_shape(config: DataConfig, source_file: str | Path) -> None:
    if config.sequence_length < 2:
        problem = "leaves no target: each position predicts the next one"
        raise ConfigError(
            problem,
            source=source_file,
            key="data.sequence_length",
            value=config.sequence_length,
            allowed="2 or more",
        )
    if config.source == "python-functions" and config.packing == "packed":
        problem = "would cut functions apart from their prompts (data.source is python-functions)"
        raise ConfigError(
            problem, source=source_file, key="data.packing", value="packed", allowed="padded", fix="packing: padded"
        )


def _too_small(samples: Samples, config: DataConfig, source_file: str | Path) -> ConfigError:
    count = f"{len(samples)} sample{'' if len(samples) == 1 else 's'}"
    problem = f"the text has {len(samples.tokens)} tokens, which makes {count}; two are needed, one to hold out"
    fix = "more text" if config.packing == "packed" else "more documents, or a longer sequence_length"
    if config.packing == "packed" and len(samples.tokens) >= 4:
        fix += f", or sequence_length: {len(samples.tokens) // 2} or less"
    return ConfigError(problem, source=source_file, key="data.sequence_length", value=config.sequence_length, fix=fix)
