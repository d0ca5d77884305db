"""Sources: every document, in a fixed order, with a hash; every mistake is one line that names the field.

Run: pytest tests/data/test_sources.py
Not covered: a hub data set that can be reached (the tests have no network), data sets larger than memory.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import DataConfig
from dsaccum.data import load_documents
from dsaccum.data.functions import MOST_FUNCTIONS, functions_of
from dsaccum.data.standard_library import decode_source, read_standard_library


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def texts(**fields) -> list[str]:
    return [document.target for document in load_documents(DataConfig(**fields), "exp.yaml").items]


def error(**fields) -> str:
    with pytest.raises(ConfigError) as caught:
        load_documents(DataConfig(**fields), "exp.yaml")
    line = str(caught.value)
    assert line.startswith("exp.yaml: data.")
    assert "\n" not in line
    return line


# --- the standard library


def test_standard_library_is_read_without_tests_and_installed_packages() -> None:
    documents = load_documents(DataConfig(), "exp.yaml")
    files = documents.description["files"]
    assert len(documents) == len(files) > 400
    assert list(files) == sorted(files)
    assert {"ast.py", "json/decoder.py"} <= set(files)
    assert not {"test", "tests", "idlelib", "site-packages"} & {part for path in files for part in path.split("/")}


def test_description_is_json_and_the_same_each_time() -> None:
    first, second = (load_documents(DataConfig(), "exp.yaml").description for _ in range(2))
    assert first == second
    assert json.loads(json.dumps(first)) == first
    assert len(first["sha256"]) == 64


def test_files_are_decoded_as_they_declare_and_the_undecodable_are_named(tmp_path: Path) -> None:
    Path("latin.py").write_bytes("# coding: latin-1\n'é'\r\n".encode("latin-1"))
    Path("bad.py").write_bytes(b"'\xe9'\n")
    Path("odd.py").write_bytes(b"# coding: no-such-codec\n")
    Path("tests").mkdir()
    Path("tests/left_out.py").write_text("1\n")
    files, unreadable = read_standard_library(tmp_path)
    assert [(file.path, file.text) for file in files] == [("latin.py", "# coding: latin-1\n'é'\n")]
    assert unreadable == ["bad.py", "odd.py"]


def test_a_byte_order_mark_is_no_text() -> None:
    assert decode_source(b"\xef\xbb\xbfx = 1\n") == "x = 1\n"


# --- functions

SOURCE = '''
class Stack:
    def push(self, item):
        """Put it on top.

        Returns nothing.
        """
        # a comment belongs to the body
        self.items.append("""
unindented
        """)

    @property
    async def size(self) -> int:
        "How many."
        def inner():
            """Part of the outer one."""
            return 1
        return len(self.items)

def undocumented(): return 1
def nothing_else():
    """Only this."""
def one_line(): "Docs."; return 1
def same_line():
    "Docs."; return 1
'''


def test_a_function_is_split_after_its_docstring_and_dedented() -> None:
    push, size = functions_of(SOURCE)
    assert push.prompt == 'def push(self, item):\n    """Put it on top.\n\n    Returns nothing.\n    """\n'
    assert push.target.startswith("    # a comment belongs to the body\n    self.items.append(")
    assert size.prompt == 'async def size(self) -> int:\n    "How many."\n'
    assert size.target.endswith("    return len(self.items)\n")


def test_functions_of_the_standard_library_are_functions() -> None:
    documents = load_documents(DataConfig(source="python-functions", packing="padded"), "exp.yaml")
    assert 1000 < len(documents) <= MOST_FUNCTIONS
    for document in documents.items[::100]:
        [function] = ast.parse(document.prompt + document.target).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is not None
        prompt_alone = ast.parse(document.prompt).body[0]
        assert len(prompt_alone.body) == 1, "the prompt holds no statement but the docstring"


def test_a_file_that_is_no_python_has_no_functions() -> None:
    assert functions_of("def f(:\n") == []
    assert functions_of("\x00") == []


# --- files


def test_a_text_file_is_one_document_and_a_json_line_another() -> None:
    Path("b.txt").write_text("second\n\n")
    Path("[a].txt").write_text("first\r\nline\n")
    Path("rows.jsonl").write_text('{"body": "x", "n": 1}\n{"body": "é", "n": 2}\n', encoding="utf-8")
    Path("list.json").write_text('[{"body": "p", "n": 3}]')
    Path("empty.jsonl").write_text("")
    fields = {"source": "files", "files": ["*.txt", "*.json*", "b.*"], "column": "body"}
    assert texts(**fields) == ["first\nline\n", "second\n\n", "p", "x", "é"]
    assert load_documents(DataConfig(**fields), "exp.yaml").description["files"]["b.txt"] == 8


def test_a_changed_file_is_read_anew_and_changes_the_hash() -> None:
    Path("a.txt").write_text("one")
    stamp = os.stat("a.txt")
    before = load_documents(DataConfig(source="files", files=["a.txt"]), "exp.yaml")
    Path("a.txt").write_text("two")
    os.utime("a.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the hardest case for a cache: same size and time
    after = load_documents(DataConfig(source="files", files=["a.txt"]), "exp.yaml")
    assert after.items[0].target == "two"
    assert before.description["sha256"] != after.description["sha256"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.txt", b"\xff\xfe", "can't be read as UTF-8 text (UnicodeDecodeError"),
        ("bad.jsonl", b'{"text": \n', "can't be read as JSON lines (ArrowInvalid"),
        ("empty.txt", b"", "holds no text"),
        ("empty.jsonl", b"", "holds no text"),
    ],
)
def test_a_bad_file_is_named(name: str, content: bytes, expected: str) -> None:
    Path("bad.txt" if name == "bad.txt" else name).write_bytes(content)
    Path("fine" + Path(name).suffix).write_text('{"text": "fine"}')
    together = [name] if "empty" in name else ["fine*", name]
    line = error(source="files", files=together)
    assert expected in line
    assert name in line
    assert "fine" not in line


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"other": "x"}', "there is no such column; allowed: other"),
        ('{"text": 1}', "the column holds int64; allowed: a column of strings"),
        ('{"text": ["x"]}', "allowed: a column of strings"),
        ('{"text": "x"}\n{"text": null}', "row 1 (from 0) is null"),
    ],
)
def test_a_bad_column_is_named(row: str, expected: str) -> None:
    Path("rows.jsonl").write_text(row)
    line = error(source="files", files=["rows.jsonl"])
    assert 'data.column = "text"' in line
    assert expected in line


@pytest.mark.parametrize("pattern", ["nothing*.txt", "folder"])
def test_a_glob_that_matches_no_file_is_named(pattern: str) -> None:
    Path("folder").mkdir()
    assert f'data.files = "{pattern}": matches no file in ' in error(source="files", files=[pattern])


@pytest.mark.parametrize("stream", ["https://example.org/a.txt", "pipe"])
def test_streams_are_refused_with_the_reason(stream: str) -> None:
    os.mkfifo("pipe")
    assert "needs random access" in error(source="files", files=[stream])


# --- data sets


def test_saved_data_sets_and_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset, DatasetDict, config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = Dataset.from_dict({"text": ["a", "b"]})
    rows.save_to_disk("alone")
    DatasetDict({"train": rows, "extra": Dataset.from_dict({"text": ["c"]})}).save_to_disk("splits")
    Path("folder").mkdir()
    Path("folder/train.jsonl").write_text('{"text": "d"}\n')
    assert texts(source="dataset", dataset="alone") == ["a", "b"]
    assert texts(source="dataset", dataset="splits", split="extra") == ["c"]
    assert texts(source="dataset", dataset="./folder") == ["d"]
    for name, allowed in (("alone", "train"), ("splits", "train, extra")):
        line = error(source="dataset", dataset=name, split="nope")
        assert f'data.split = "nope": {name} has no such split; allowed: {allowed}' in line
    assert "split 'nope' can't be loaded" in error(source="dataset", dataset="./folder", split="nope")
    assert "data.column" in error(source="dataset", dataset="alone", column="body")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("./nowhere", "there is no such directory"), ("nobody/nothing", "split 'train' can't be loaded (ConnectionError")],
)
@pytest.mark.usefixtures("offline")
def test_a_data_set_that_cannot_be_found_or_reached_is_named(name: str, expected: str) -> None:
    assert f'data.dataset = "{name}": {expected}' in error(source="dataset", dataset=name)
