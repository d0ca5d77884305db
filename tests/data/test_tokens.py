"""Tokenizers: the byte tokenizer's ids are ByT5's; what transformers loads keeps the same promises.

Run: pytest tests/data/test_tokens.py
Not covered: a tokenizer from the hub (the tests have no network), slow (pure Python) tokenizers other than ByT5's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsaccum.config.errors import ConfigError
from dsaccum.data import load_tokenizer

TRICKY = ["", "\n", "\r\n", " a ", "\x00", "a\x1fb", "é", "ÿ\x80", "日本", "\u2028", "\ufffd", "😀", "<s>", "</ s>"]
SPECIAL_SPELLINGS = ["</s>", "<pad>", "<extra_id_3>", "x </s> y"]


@pytest.fixture(scope="module")
def byt5():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A saved tokenizer of whole words whose ids have a hole: 3 tokens, largest id 9."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "[END]": 9}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[END]")
    fast.save_pretrained(tmp_path / "words")
    return tmp_path / "words"


@pytest.mark.parametrize("text", TRICKY)
def test_byte_ids_equal_byt5(text: str, byt5) -> None:
    ids = load_tokenizer("bytes").encode(text)
    assert ids.tolist() == byt5.encode(text, add_special_tokens=False)
    assert load_tokenizer("bytes").decode(ids) == text


def test_byte_special_ids_and_size_equal_byt5(byt5) -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.end_token, tokenizer.pad_token, len(tokenizer)) == (
        byt5.eos_token_id,
        byt5.pad_token_id,
        len(byt5),
    )


@pytest.mark.parametrize("text", SPECIAL_SPELLINGS)
def test_spelling_a_special_token_in_a_text_makes_bytes_not_the_token(text: str, byt5) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.min() >= 3
    assert tokenizer.decode(ids) == text
    assert ids.tolist() != byt5.encode(text, add_special_tokens=False), "negative control: this is where ByT5 differs"


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.max(initial=0) < len(tokenizer)


def test_decoding_leaves_out_special_ids_and_cut_characters() -> None:
    tokenizer = load_tokenizer("bytes")
    cut = tokenizer.encode("aé")[:-1].tolist()
    assert tokenizer.decode([0, *cut, 1, 2, 383]) == "a"


def test_saved_bytes_are_loaded_by_transformers_and_by_us(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    load_tokenizer("bytes").save(tmp_path)
    expected = load_tokenizer("bytes").encode("héllo").tolist()
    assert AutoTokenizer.from_pretrained(tmp_path).encode("héllo", add_special_tokens=False) == expected
    assert load_tokenizer(str(tmp_path)).encode("héllo").tolist() == expected


def test_local_directory_ids_are_below_the_length_and_padding_falls_back_to_the_end_token(word_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(str(word_tokenizer))
    ids = tokenizer.encode("hello nobody hello")
    assert ids.tolist() == [1, 0, 1]
    assert np.issubdtype(ids.dtype, np.integer)
    assert (tokenizer.end_token, tokenizer.pad_token, len(tokenizer)) == (9, 9, 10)
    assert tokenizer.encode("").shape == (0,)


def test_saving_keeps_the_ids(word_tokenizer: Path, tmp_path: Path) -> None:
    load_tokenizer(str(word_tokenizer)).save(tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).encode("hello").tolist() == [1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./nowhere", "there is no such directory"),
        ("nobody/nothing", "there is no usable tokenizer on the hub or in its local cache"),
        ("EMPTY", "there is no usable tokenizer in this directory"),
        ("BROKEN", "there is no usable tokenizer in this directory"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_a_tokenizer_that_cannot_be_loaded_is_one_line_that_names_the_field(
    name: str, expected: str, tmp_path: Path
) -> None:
    if name in ("EMPTY", "BROKEN"):
        directory = tmp_path / name
        directory.mkdir()
        if name == "BROKEN":
            (directory / "tokenizer.json").write_text("{")
            (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        name = str(directory)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(name, "exp.yaml")
    assert str(caught.value).startswith("exp.yaml: data.tokenizer = ")
    assert "\n" not in str(caught.value)
    assert expected in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(word_tokenizer: Path) -> None:
    config = word_tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "eos_token"}))
    (word_tokenizer / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"data\.tokenizer.*no end-of-text token"):
        load_tokenizer(str(word_tokenizer))


def test_default_data_import_neither_transformers_nor_datasets_nor_deepspeed() -> None:
    code = (
        "import sys; from dsaccum.config.experiment import DataConfig; from dsaccum.data import load_data;"
        "load_data(DataConfig(), 'exp.yaml');"
        "print([name for name in ('transformers', 'datasets', 'deepspeed') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"
