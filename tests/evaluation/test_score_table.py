"""The table of figures."""

import io

import pytest
from rich.console import Console

from crosscut.evaluation.score_table import in_a_line, print_report, show

TASK = {
    "figures": {"perplexity": 19.3123, "loss_per_token": 2.69},
    "counts": {"words": 245_566},
    "protocol": {"window": 1024, "stride": 32},
    "data": [{"file": "wiki.test.tokens", "sha256": "0" * 64}],
    "seconds": 12.34,
    "tokens_per_second": 4321.0,
}
REPORT = {
    "model": {"name": "megatron-355m", "parameters": 354_823_168, "averaged_weights": False},
    "layout": "tensor 2 x data 1",
    "device": "cpu",
    "precision": "float32",
}


def printed(**tasks: dict) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report({**REPORT, "tasks": tasks}, console)
    return console.file.getvalue()


def test_table_tells_figures_counts_protocol_and_speed():
    out = printed(wikitext103=TASK)
    for expected in (
        "megatron-355m, 354,823,168 parameters, on tensor 2 x data 1, cpu, float32", "WikiText-103: wiki.test.tokens",
        "19.31", "loss per token", "245,566 words", "window 1024, stride 32", "4,321 tokens/s, 12.3 s",
    ):  # fmt: skip
        assert expected in out, expected


def test_first_documents_are_listed_and_the_others_counted():
    documents = [
        {"source": "[b].jsonl", "record": i, "tokens": 7, "perplexity": 5.0, "bits_per_byte": None} for i in range(25)
    ]
    out = printed(text={**TASK, "documents": documents})
    assert "[b].jsonl:19" in out
    assert "[b].jsonl:20" not in out
    assert "infinite" in out
    assert "and 5 more documents" in out


def test_one_of_a_kind_is_told_as_one():
    out = printed(text={**TASK, "counts": {"documents": 1, "passages_cut": 1, "windows": 3}})
    assert "1 document, 1 passage cut, 3 windows" in out


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("perplexity", 10.8123, "10.81"),
        ("perplexity", 12_345.6, "12,346"),
        ("perplexity", 2.5e10, "2.5e+10"),
        ("perplexity", None, "infinite"),
        ("last_token_accuracy", 0.66512, "66.51%"),
    ],
)
def test_figures_are_told_in_digits_that_say_something(name, value, told):
    assert show(name, value) == told


def test_a_line_leaves_out_what_is_said_already():
    assert (
        in_a_line({"a_perplexity": 2.0, "a_loss_per_token": 0.7, "b_accuracy": 0.5})
        == "a perplexity 2, b accuracy 50.00%"
    )
