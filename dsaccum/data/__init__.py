"""Data: documents from a source, tokens from documents, samples from tokens, and the order in which they are seen.

Everything here is the same on every rank and for every way of splitting the effective batch; only ``WindowStream``
knows its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsaccum.config.experiment import DataConfig
from dsaccum.data.order import FILLER, WindowOrder, epoch_order, rank_rows
from dsaccum.data.samples import NOT_A_TARGET, Samples, split_held_out
from dsaccum.data.sources import load_documents
from dsaccum.data.stream import WindowStream, collate, held_out_batches
from dsaccum.data.tokens import Tokenizer, load_tokenizer

__all__ = [
    "FILLER",
    "NOT_A_TARGET",
    "Data",
    "Samples",
    "Tokenizer",
    "WindowOrder",
    "WindowStream",
    "collate",
    "epoch_order",
    "held_out_batches",
    "load_data",
    "load_documents",
    "load_tokenizer",
    "rank_rows",
    "split_held_out",
]


@dataclass(frozen=True)
class Data:
    """Everything that an experiment's ``data`` section stands for.

    Args:
        tokenizer: text to ids and back.
        samples: what is trained on.
        held_out: what training never sees, the same whatever any seed is.
        description: what was read, for the run's record (JSON types only), with a sha256 over the content.
    """

    tokenizer: Tokenizer
    samples: Samples
    held_out: Samples
    description: dict[str, Any]


def load_data(config: DataConfig, source_file: str | Path) -> Data:
    """Read the documents, tokenize them, and make the samples.

    Args:
        config: the experiment's ``data`` section.
        source_file: the experiment's file, for messages.

    Raises:
        ConfigError: anything in the section that can't be used, in one line.
    """
    tokenizer = load_tokenizer(config.tokenizer, source_file)
    documents = load_documents(config, source_file)
    training, held_out, held_out_by = split_held_out(documents, tokenizer, config, source_file)
    description = {
        **documents.description,
        "tokenizer": config.tokenizer,
        "vocabulary": len(tokenizer),
        "samples": len(training),
        "held_out_samples": len(held_out),
        "held_out_by": held_out_by,
        "dropped_tokens": training.dropped_tokens,
    }
    return Data(tokenizer, training, held_out, description)
