"""Samples: what is a target and what isn't; the held-out ones are nobody's training samples.

Run: pytest tests/data/test_samples.py
Not covered: whether a corpus fits into memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import DataConfig
from dsaccum.data import NOT_A_TARGET, load_data, load_tokenizer, split_held_out
from dsaccum.data.documents import Document, Documents
from dsaccum.data.samples import build_samples

BYTES = load_tokenizer("bytes")
END = BYTES.end_token


def ids(text: str) -> list[int]:
    return BYTES.encode(text).tolist()


def corpus(count: int) -> Documents:
    return Documents([Document(f"[document {number}]") for number in range(count)], {})


def contents(samples) -> list[str]:
    return [BYTES.decode(samples[index][0]) for index in range(len(samples))]


def test_packed_samples_are_the_stream_of_documents_in_full_rows() -> None:
    samples = build_samples([Document("abc"), Document(""), Document("defgh")], BYTES, DataConfig(sequence_length=4))
    stream = [*ids("abc"), END, END, *ids("defgh"), END]
    assert [samples[index][0].tolist() for index in range(len(samples))] == [stream[:4], stream[4:8]]
    assert samples.dropped_tokens == len(stream) - 8
    for index in range(len(samples)):
        input_ids, labels = samples[index]
        assert input_ids.dtype == labels.dtype == np.int64
        assert (input_ids == labels).all()


def test_padded_samples_are_documents_with_their_end_cut_at_the_sequence_length() -> None:
    config = DataConfig(sequence_length=4, packing="padded")
    samples = build_samples([Document("abcdef"), Document("a"), Document("")], BYTES, config)
    rows = [samples[index][0].tolist() for index in range(len(samples))]
    assert rows == [ids("abcd"), [*ids("a"), END]], "the empty document has no target: its end is the first position"
    assert samples.dropped_tokens == 7 + 2 + 1 - 4 - 2


def test_a_prompt_is_no_target_and_the_end_is_one() -> None:
    config = DataConfig(sequence_length=8, packing="padded")
    [sample] = build_samples([Document("xy", prompt="abc")], BYTES, config)
    assert sample[0].tolist() == [*ids("abcxy"), END]
    assert sample[1].tolist() == [NOT_A_TARGET] * 3 + [*ids("xy"), END]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.text("ab", max_size=9), st.text("ab", max_size=9)), max_size=8),
    st.integers(2, 12),
    st.sampled_from(["packed", "padded"]),
)
def test_every_sample_has_a_target_after_the_shift_and_none_that_has_is_left_out(pairs, length, packing) -> None:
    documents = [Document(target, prompt=prompt) for prompt, target in pairs]
    samples = build_samples(documents, BYTES, DataConfig(sequence_length=length, packing=packing))
    for index in range(len(samples)):
        input_ids, labels = samples[index]
        assert len(input_ids) == len(labels) <= length
        assert (labels[1:] != NOT_A_TARGET).sum() >= 1
    if packing == "padded":
        # closed form: after the cut, something must follow both the prompt and the first position
        expected = sum(min(len(p) + len(t) + 1, length) > max(len(p), 1) for p, t in pairs)
        assert len(samples) == expected


def test_large_vocabularies_keep_their_ids() -> None:
    class Wide:
        end_token, pad_token = 70_000, 0

        def __len__(self) -> int:
            return 70_001

        def encode(self, text: str) -> np.ndarray:
            return np.full(len(text), 69_999)

    [sample] = build_samples([Document("a")], Wide(), DataConfig(packing="padded"))
    assert sample[0].tolist() == [69_999, 70_000]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_held_out_documents_and_their_copies_are_never_trained_on(packing: str) -> None:
    documents = Documents(corpus(100).items + corpus(100).items[:50], {})
    config = DataConfig(sequence_length=20 if packing == "packed" else 64, packing=packing)
    split = split_held_out(documents, BYTES, config, "exp.yaml")
    assert split.by == "document"
    training, held_out = BYTES.decode(split.training.tokens), BYTES.decode(split.held_out.tokens)
    on_which_side = [(document.target in training, document.target in held_out) for document in documents.items[:100]]
    assert on_which_side.count((False, True)) == 100 // 20
    assert on_which_side.count((True, False)) == 95


def test_held_out_documents_depend_on_content_alone() -> None:
    config = DataConfig(packing="padded")
    held_out = [
        set(contents(split_held_out(documents, BYTES, config.model_copy(update={"seed": seed}), "exp.yaml").held_out))
        for seed, documents in ((0, corpus(60)), (1, Documents(corpus(60).items[::-1], {})))
    ]
    assert held_out[0] == held_out[1]
    other = split_held_out(Documents([Document(f"other {n}") for n in range(60)], {}), BYTES, config, "exp.yaml")
    assert set(contents(other.held_out)) != held_out[0], "negative control"


def test_few_documents_hold_out_the_last_samples() -> None:
    documents = Documents([Document("x" * 1000)], {})
    split = split_held_out(documents, BYTES, DataConfig(sequence_length=10), "exp.yaml")
    assert (split.by, len(split.training), len(split.held_out)) == ("sample", 95, 5)


def test_held_out_documents_shorter_than_a_sample_fall_back_to_the_last_samples() -> None:
    documents = Documents([Document(str(number)) for number in range(30)], {})
    split = split_held_out(documents, BYTES, DataConfig(sequence_length=16), "exp.yaml")
    assert (split.by, len(split.held_out)) == ("sample", 1)


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({"sequence_length": 1}, "abc", "data.sequence_length = 1: leaves no target"),
        ({"source": "python-functions"}, "abc", 'data.packing = "packed": would cut functions apart'),
        ({}, "abcd", "the text has 5 tokens, which makes 0 samples"),
        ({}, "x" * 300, "301 tokens, which makes 1 sample; two are needed, one to hold out; fix: more text, or "),
        ({"packing": "padded"}, "abc", "data.sequence_length = 256: the text has 4 tokens, which makes 1 sample"),
    ],
)
def test_a_shape_or_text_without_two_samples_is_refused_in_one_line(fields: dict, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_held_out(Documents([Document(text)], {}), BYTES, DataConfig(**fields), "exp.yaml")
    assert str(caught.value).startswith("exp.yaml: data.")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_suggested_sequence_length_works() -> None:
    documents = Documents([Document("x" * 300)], {})
    split = split_held_out(documents, BYTES, DataConfig(sequence_length=301 // 2), "exp.yaml")
    assert (len(split.training), len(split.held_out)) == (1, 1)


def test_default_data_are_ready_and_described() -> None:
    data = load_data(DataConfig(), "exp.yaml")
    assert len(data.samples) > 10 * len(data.held_out) > 0
    assert data.samples.tokens.dtype == np.uint16
    assert data.description["samples"] == len(data.samples)
    assert data.description["held_out_by"] == "document"


def test_function_data_are_ragged() -> None:
    data = load_data(DataConfig(source="python-functions", packing="padded", sequence_length=512), "exp.yaml")
    targets = [int((data.samples[index][1][1:] != NOT_A_TARGET).sum()) for index in range(200)]
    assert min(targets) >= 1
    assert len(set(targets)) > 50
