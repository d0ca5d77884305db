"""What is asked for is checked before anything is loaded: ranges, and that a loop exists without running its file.

Run: pytest tests/cli/test_arguments.py -n 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.cases.arguments import LOOPS, VerifyArguments

CODE = """
from math import *
"""
LOOP = """
raise RuntimeError("must not be run")
from os import path as given
def mine(engine, micro_batch): ...
async_one = lambda engine, micro_batch: None
"""


@pytest.mark.parametrize("loop", LOOPS)
def test_our_loops(loop: str) -> None:
    VerifyArguments(Path("x"), loop=loop)


def test_our_loops_are_those_that_can_be_run() -> None:
    from dsaccum.verification.subject import loops

    assert set(LOOPS) == {loops.DSACCUM, loops.HF_LABELS, loops.OUTSIDE_LOSS}


@pytest.mark.parametrize("name", ["mine", "async_one", "given"])
def test_a_function_in_a_file_is_found_without_running_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOP)
    VerifyArguments(Path("x"), loop=f"{tmp_path}/loops.py:{name}")


def test_what_a_star_brings_cannot_be_known(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(CODE)
    VerifyArguments(Path("x"), loop=f"{tmp_path}/loops.py:anything")


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("hf-label", "there is no such loop; allowed: dsaccum, hf-labels, outside-loss, or FILE.py:function; "
                     "fix: --loop hf-labels"),
        ("zzz", "there is no such loop"),
        ("", "there is no such loop"),
        (":mine", "there is no such loop"),
        ("{folder}/loops.py", "there is no such loop"),
        ("{folder}/none.py:mine", "none.py cannot be read (No such file or directory)"),
        ("{folder}:mine", "cannot be read (Is a directory)"),
        ("{folder}/loops.py:mien", "loops.py has no function 'mien'; fix: --loop {folder}/loops.py:mine"),
        ("{folder}/loops.py:zzz", "has no function 'zzz'; fix: define zzz in {folder}/loops.py"),
        ("{folder}/broken.py:mine", "is not Python ("),
        ("{folder}/zeros.py:mine", "is not Python ("),
    ],
)  # fmt: skip
def test_a_loop_that_is_not_there(loop: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOP)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "zeros.py").write_bytes(b"\0\0")
    with pytest.raises(ConfigError) as raised:
        VerifyArguments(Path("x"), loop=loop.format(folder=tmp_path))
    assert said.format(folder=tmp_path) in str(raised.value)


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"steps": 0}, {"steps": 65}, {"accumulation_steps": 0},
                                   {"micro_batch": -1}])  # fmt: skip
def test_numbers_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="is no"):
        VerifyArguments(Path("x"), **wrong)
    VerifyArguments(Path("x"), ranks=1, steps=64, accumulation_steps=1, micro_batch=1)
