"""Prompts from files."""

import json
from pathlib import Path

import pytest

from crosscut.generation.prompts import read_prompts


@pytest.mark.parametrize("within", ["\u2028", "\x85", "\x0b", "\r"])
def test_only_line_ends_part_prompts(tmp_path: Path, within: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"It{within}was\r\n\r\nFellow\n".encode())
    assert read_prompts(file) == (f"It{within}was", "Fellow")


def test_records_may_hold_line_separators_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "It\u2028was"}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert read_prompts(file) == ("It\u2028was",)


def test_prompts_of_the_paper_are_those_of_its_appendix(shared: Path) -> None:
    (paper,) = (shared / "seeds").glob("000_*.txt")
    appendix = " ".join(paper.read_text(encoding="utf-8").rpartition("EXT S AMPLES")[2].split())
    prompts = read_prompts(Path(__file__).parents[2] / "examples" / "paper" / "prompts.txt")
    assert len(prompts) == appendix.count("Context:") == 5
    assert all(f"Context: {prompt} " in appendix for prompt in prompts)
