"""lm-eval's own loop over tasks of a local file, on a tiny model, beside what `transformers` gives."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError, Layout
from crosscut.data import Tokenizer
from crosscut.parallel import make_mesh
from crosscut.pretrained import find_model
from tests.pretrained.models import make, their_model
from tests.ranks import RankPool

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog over the lazy"], "answer": 0},
    {"question": "the lazy dog jumps over", "choices": [" the quick", " fox"], "answer": 1},
    {"question": "over", "choices": [" the dog", " jumps the fox", " lazy"], "answer": 2},
]

LONG = "the quick brown fox jumps over the lazy dog " * 12

TASKS = {
    "tiny_choice": """\
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
""",
    "tiny_rolling": """\
task: tiny_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
""",
    "tiny_writing": """\
task: tiny_writing
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
""",
}
DATA = """\
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
"""


def tokens_after(folder: Path, text: str, number: int) -> str:
    """What `transformers` writes, greedily."""
    model, tokenizer = their_model(folder, torch.float32).eval(), Tokenizer.load(folder / "tokenizer.json")
    ids = tokenizer.encode(text)
    written: list[int] = []
    with torch.no_grad():
        for _ in range(number):
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
            if written[-1] == tokenizer.end_of_text:
                break
    return tokenizer.decode(ids + written)[len(text) :].partition("\n")[0]


def loss_of(folder: Path, before: list[int], text: str) -> float:
    model, tokenizer = their_model(folder, torch.float32).eval(), Tokenizer.load(folder / "tokenizer.json")
    ids = [*before, *tokenizer.encode(text)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(before) - 1 : -1]
    return F.cross_entropy(logits, torch.tensor(ids[len(before) :]), reduction="sum").item()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def tasks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their files; the texts to be written are the model's own, all but one."""
    folder = tmp_path_factory.mktemp("tasks")
    rows: list[dict[str, Any]] = [{**q, "written": tokens_after(model, str(q["question"]), 5)} for q in QUESTIONS]
    rows[1]["written"] = "something else"
    for row in rows:
        row["choices"] += [" the"] * (3 - len(row["choices"]))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + DATA.format(file=folder / "questions.jsonl"))
    return folder


def answers(layout: Layout, folder: str) -> dict[str, Any]:
    """On a rank: what lm-eval gets."""
    from lm_eval.api.instance import Instance

    from crosscut.harness.adapter import CrosscutLM

    def requests(*arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance("any", {}, each, i) for i, each in enumerate(arguments)]

    source = find_model(folder)
    lm = CrosscutLM(source.load(make_mesh(layout, torch.device("cpu"))), source, batch_size=2)
    pairs = [(q["question"], choice) for q in QUESTIONS for choice in q["choices"]]
    return {
        "pairs": lm.loglikelihood(requests(*pairs, ("", "the fox"))),
        "rolling": lm.loglikelihood_rolling(requests(("the quick brown fox",), (LONG,))),
        "written": lm.generate_until(
            requests(
                ("the quick", {"until": ["\n"], "max_gen_toks": 6}),
                (LONG, {"until": [], "max_gen_toks": 4}),
                ("over", {"max_gen_toks": 6, "do_sample": True, "temperature": 0.9, "top_k": 3}),
            )
        ),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what lm-eval imports
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2),
        pytest.param(Layout(), marks=pytest.mark.slow),  # each rank takes seconds to import lm-eval
        pytest.param(Layout(tensor=2, data=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_are_those_of_transformers(ranks: RankPool, model: Path, layout: Layout) -> None:
    tokenizer = Tokenizer.load(model / "tokenizer.json")
    one, *others = ranks.run(layout.world_size, answers, layout, str(model))
    for other in others:
        assert other == one
    pairs = [(tokenizer.encode(str(q["question"])), choice) for q in QUESTIONS for choice in q["choices"]]
    expected = [loss_of(model, before, choice) for before, choice in [*pairs, ([0], "the fox")]]
    assert [-logprob for logprob, _ in one["pairs"]] == pytest.approx(expected, rel=1e-4)
    long = tokenizer.encode(LONG)
    assert len(long) > 64, "longer than the model's window"
    assert -one["rolling"][0] == pytest.approx(loss_of(model, [0], "the quick brown fox"), rel=1e-4)
    assert one["written"][0] == tokens_after(model, "the quick", 6)
    assert one["written"][1] == tokens_after(model, tokenizer.decode(long[-60:]), 4)


@pytest.mark.slow
def test_tasks_give_what_transformers_gives(
    model: Path,
    tasks: Path,
    crosscut: Callable[..., CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    written = tmp_path / "scores.json"
    done = crosscut(
        "evaluate", str(model), "--harness", ",".join(TASKS), "--harness-folder", str(tasks), "--tensor", "2",
        "--device", "cpu", "--batch-size", "2", "--output", str(written), timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tiny_choice" in done.stdout
    results = json.loads(written.read_text())["harness"]["results"]

    tokenizer = Tokenizer.load(model / "tokenizer.json")
    rows = [json.loads(line) for line in (tasks / "questions.jsonl").read_text().splitlines()]
    right = [
        min(range(3), key=lambda i: loss_of(model, tokenizer.encode(row["question"]), row["choices"][i]))
        == row["answer"]
        for row in rows
    ]
    assert results["tiny_choice"]["acc,none"] == sum(right) / 3
    loss = sum(loss_of(model, [0], row["question"]) for row in rows)
    num_words = sum(len(row["question"].split()) for row in rows)
    expected = float(torch.tensor(loss / num_words).exp())
    assert results["tiny_rolling"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-4)
    assert results["tiny_writing"]["exact_match,none"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--harness", "tiny_choise"),
            "`--harness` must name tasks of lm-eval, but `tiny_choise` is none. The nearest is `tiny_choice`.",
            marks=pytest.mark.slow,  # lm-eval looks through thousands of files
        ),
        (("--harness", "tiny_choice", "--harness-folder", "nowhere"), "`--harness-folder` must be a folder with task"),
        (("--harness", "tiny_choice", "--text", "a.txt"), "There must be something to score, either files"),
        (("--harness", "tiny_choice", "--limit", "-1"), "`--limit` must be at least 0, but is -1."),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what lm-eval imports
def test_a_mistake_is_one_message(model: Path, tasks: Path, options: tuple[str, ...], message: str) -> None:
    folder = () if "--harness-folder" in options else ("--harness-folder", str(tasks))
    result = CliRunner().invoke(commands, ["evaluate", str(model), *folder, *options])
    assert isinstance(result.exception, ConfigError), result.exception
    assert str(result.exception).startswith(message)
