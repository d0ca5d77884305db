"""Tokenizers: bytes, which needs no files, and whatever transformers can load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from dsaccum.config.errors import ConfigError
from dsaccum.data.local import is_missing_directory

_KEY: Final = "data.tokenizer"
_ALLOWED: Final = "bytes, a local directory, or a hub id"


class Tokenizer(Protocol):
    """Text to ids and back; ``len(tokenizer)`` is the vocabulary's size, and every id is smaller."""

    @property
    def end_token(self) -> int:
        """Id that ends a document; a target like any other."""

    @property
    def pad_token(self) -> int:
        """Id that fills up rows; never a target."""

    def __len__(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text without any token added, [tokens], an integer type."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, without special tokens."""

    def save(self, directory: str | Path) -> None:
        """Write files from which ``AutoTokenizer.from_pretrained(directory)`` makes an equivalent tokenizer."""


def load_tokenizer(name: str, source_file: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer that ``data.tokenizer`` names.

    Args:
        name: ``bytes``, a local directory, or a hub id.
        source_file: the experiment's file, for messages.

    Raises:
        ConfigError: it can't be found, reached or read, or it has no end-of-text token.
    """
    return ByteTokenizer() if name == "bytes" else _load_with_transformers(name, source_file)


class ByteTokenizer:
    """UTF-8 bytes plus 3: the ids of ``ByT5Tokenizer``, without importing transformers to encode or decode.

    One deliberate difference: ByT5 turns a special token's spelling inside a text (``</s>``, ``<pad>``,
    ``<extra_id_0>``) into that special token; here text is always bytes, so no document can hold a false end.
    """

    pad_token: Final = 0
    end_token: Final = 1
    _FIRST_BYTE: Final = 3  # after pad, end and unknown

    def __len__(self) -> int:
        return 384  # ByT5's: 3 special tokens, 256 bytes, 125 spare ids

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text's UTF-8 bytes, [bytes], int32."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + self._FIRST_BYTE

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids that are bytes; cut or invalid UTF-8 sequences are left out, as ByT5 does."""
        values = np.asarray(list(ids), dtype=np.int64) - self._FIRST_BYTE
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode(errors="ignore")

    def save(self, directory: str | Path) -> None:
        """Write ByT5's tokenizer files."""
        from transformers import ByT5Tokenizer

        ByT5Tokenizer().save_pretrained(directory)


class _TransformersTokenizer:
    """A tokenizer of transformers; special tokens' spellings inside a text follow its own rules."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end_token: int = tokenizer.eos_token_id
        # Padding is masked and never a target, so that any id will do where there's no pad token.
        self.pad_token: int = self.end_token if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # Some vocabularies have holes: their largest id is not smaller than the number of their tokens.
        self._size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> np.ndarray:
        # verbose=False: documents may be longer than the model's context; they're cut into samples later.
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, directory: str | Path) -> None:
        self._tokenizer.save_pretrained(directory)


def _load_with_transformers(name: str, source_file: str | Path | None) -> Tokenizer:
    place: dict[str, Any] = {"source": source_file, "key": _KEY, "value": name}
    if is_missing_directory(name):
        raise ConfigError("there is no such directory", **place, allowed=_ALLOWED)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # False, not None: never ask
    except Exception as error:  # a broken file ends in any of a dozen types, the Rust side's bare Exception included
        where = "in this directory" if Path(name).is_dir() else "on the hub or in its local cache"
        reason = str(error).strip().split("\n")[0]
        problem = f"there is no usable tokenizer {where} ({type(error).__name__}: {reason})"
        raise ConfigError(problem, **place, allowed=_ALLOWED, fix=f"{_KEY}: bytes, which needs no files") from error
    if tokenizer.eos_token_id is None:
        fix = 'set "eos_token" in its tokenizer_config.json'
        raise ConfigError("has no end-of-text token, so documents can't be told apart", **place, fix=fix)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        fix = "a directory with a whole tokenizer (tokenizer.json)"
        raise ConfigError("has special tokens only: its vocabulary is missing", **place, fix=fix)
    return _TransformersTokenizer(tokenizer)
