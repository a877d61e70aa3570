"""lm-eval's own loop over tasks of a local file, on a tiny model, beside what `transformers` gives."""

import json
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError, CrosscutError, Layout
from crosscut.data import Tokenizer
from crosscut.parallel import make_mesh
from crosscut.pretrained import find_model
from tests.pretrained.models import edit, make, their_model
from tests.ranks import RankPool
from tests.refusals import refusal

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what lm-eval imports
]

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
    """Greedy continuation of a text by `transformers`, up to the end of the line."""
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
    ids = [*before, *tokenizer.encode_prompt(text)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(before) - 1 : -1]
    return F.cross_entropy(logits, torch.tensor(ids[len(before) :]), reduction="sum").item()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their libraries look for nothing outside of this machine."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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


def ours_of(folder: str, layout: Layout | None = None) -> Any:
    """On a rank: the model of a folder, as lm-eval gets it."""
    from crosscut.harness.adapter import CrosscutLM

    source = find_model(folder)
    model = source.load(make_mesh(layout or Layout(), torch.device("cpu")))
    return CrosscutLM(model, source, batch_size=2)


def requests(*arguments: tuple[Any, ...], task: str | None = None) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("any", {}, each, i, (task, i, 1)) for i, each in enumerate(arguments)]


def answers(layout: Layout, folder: str) -> dict[str, Any]:
    """On a rank: what lm-eval gets."""
    lm = ours_of(folder, layout)
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


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=2, data=2)], ids=str)
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


TOKENIZERS: dict[str, tuple[bool, dict[str, Any]]] = {
    "begun": (True, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}),
    "plain": (False, {"bos_token": None, "eos_token": "<|endoftext|>"}),
    "with a begin": (False, {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "<|turn|>"}),
    "with an end of its own": (False, {"eos_token": "<|turn|>"}),
}
"""Whether one puts `<s>` before every text, and what its folder names as the begin and the end of a text."""


def with_special_tokens(model: Path, folder: Path, *, begins: bool, names: dict[str, Any]) -> Path:
    """The model with a tokenizer that knows two more special tokens."""
    import tokenizers

    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<s>", "<|turn|>"])
    begin = made.token_to_id("<s>")
    if begins:
        tokens = [("<s>", begin)]
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=tokens)
        edit(folder, bos_token_id=begin)
    made.save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def begun(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    begins, names = TOKENIZERS["begun"]
    return with_special_tokens(model, tmp_path_factory.mktemp("begun") / "tiny", begins=begins, names=names)


ASKED = [
    *((str(q["question"]), choice) for q in QUESTIONS for choice in q["choices"]),
    ("", "the fox"),
    ("the lazy ", "dog"),
    ("<s>the lazy", " dog"),
    ("<|turn|>the lazy<|turn|>", " dog"),
    (LONG, " the fox"),
]
ROLLED = ["the quick brown fox", "<s>the quick", "<|turn|>over", LONG]
BEGUN = ["the quick", "<s>the quick", "<|turn|>the<|turn|>", LONG]


def asked_of(lm: Any) -> dict[str, Any]:
    """Answers of an implementation of lm-eval's model interface."""
    wishes = {"until": ["\n"], "max_gen_toks": 6}
    return {
        "prefix": lm.prefix_token_id,
        "ids": [lm.tok_encode(context) for context in BEGUN],
        "pairs": lm.loglikelihood(requests(*ASKED)),
        "rolling": lm.loglikelihood_rolling(requests(*((text,) for text in ROLLED))),
        "written": [  # one at a time, since `hf` looks only at the first of a batch
            text for one in BEGUN for text in lm.generate_until(requests((one, wishes)))
        ],
    }


def asked_of_ours(folder: str) -> dict[str, Any]:
    return asked_of(ours_of(folder))


@pytest.mark.filterwarnings("ignore")  # of what lm-eval and what it uses import
@pytest.mark.parametrize(("begins", "names"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_answers_are_those_of_their_hf_models(
    ranks: RankPool, model: Path, tmp_path: Path, begins: bool, names: dict[str, Any]
) -> None:
    from lm_eval.models.huggingface import HFLM

    folder = str(with_special_tokens(model, tmp_path / "tiny", begins=begins, names=names))
    theirs = asked_of(HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=2))
    (ours,) = ranks.run(1, asked_of_ours, folder)
    assert ours["prefix"] == theirs["prefix"]
    assert ours["ids"] == theirs["ids"]
    assert [logprob for logprob, _ in ours["pairs"]] == pytest.approx([one for one, _ in theirs["pairs"]], rel=1e-4)
    assert [hit for _, hit in ours["pairs"]] == [hit for _, hit in theirs["pairs"]]
    assert ours["rolling"] == pytest.approx(theirs["rolling"], rel=1e-4)
    assert ours["written"] == theirs["written"]


def test_what_the_tokenizer_puts_before_every_text_is_there(ranks: RankPool, begun: Path) -> None:
    (ours,) = ranks.run(1, asked_of_ours, str(begun))
    tokenizer = Tokenizer.load(begun / "tokenizer.json")
    begin, turn = (tokenizer.encode_prompt(name)[0] for name in ("<s>", "<|turn|>"))
    the, long = tokenizer.encode("the"), tokenizer.encode(LONG)
    quick, lazy = tokenizer.encode("the quick"), tokenizer.encode("the lazy")
    assert ours["ids"] == [[begin, *quick], [begin, *quick], [begin, turn, *the, turn], [begin, *long]]
    contexts = [[begin, *tokenizer.encode(str(q["question"]))] for q in QUESTIONS for _ in q["choices"]]
    contexts += [[begin], [begin, *lazy], [begin, *lazy], [begin, turn, *lazy, turn]]
    texts = [choice for q in QUESTIONS for choice in q["choices"]] + ["the fox", " dog", " dog", " dog"]
    expected = [loss_of(begun, before, text) for before, text in zip(contexts, texts, strict=True)]
    assert [-logprob for logprob, _ in ours["pairs"][:-1]] == pytest.approx(expected, rel=1e-4)
    assert -ours["rolling"][0] == pytest.approx(loss_of(begun, [begin], "<s>the quick brown fox"), rel=1e-4)


def writing_of(folder: str, num_tokens: int | None, contexts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Texts that are generated after the contexts, and the messages about them."""
    from crosscut.harness import adapter

    told: list[str] = []
    wishes = {"until": []} | ({} if num_tokens is None else {"max_gen_toks": num_tokens})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter._LOG, "warning", told.append)
        asked = requests(*((context, wishes) for context in contexts), task="tiny")
        return ours_of(folder).generate_until(asked), told


def test_suggestions_of_a_model_are_named(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    """lm-eval's `hf` models follow the penalty, so their texts differ."""
    file = shutil.copytree(model, tmp_path / "model") / "generation_config.json"
    file.write_text('{"repetition_penalty": 1.3, "max_new_tokens": 9}')
    ((_, told),) = ranks.run(1, writing_of, str(file.parent), 5, ("the quick", "the"))
    assert told == [f"`{file}` suggests repetition_penalty = 1.3. The `generation_kwargs` of each task decide."]


def test_a_context_keeps_what_fits_beside_what_is_written(ranks: RankPool, model: Path) -> None:
    tokenizer = Tokenizer.load(model / "tokenizer.json")
    long = tokenizer.encode(LONG)
    assert len(tokenizer.encode("the")) == 1
    ((texts, told),) = ranks.run(1, writing_of, str(model), 63, (LONG, "the"))
    assert texts == [tokens_after(model, tokenizer.decode(ids), 63) for ids in (long[-1:], tokenizer.encode("the"))]
    message = (
        "1 of 2 contexts lose their first tokens, because the model's window of 64 tokens must also hold the "
        "generated text."
    )
    assert told == [message]
    ((_, told),) = ranks.run(1, writing_of, str(model), 62, ("the quick",))
    assert told == [], "two tokens fit"


@pytest.mark.parametrize(("asked", "number"), [(64, 64), (None, 256)])
def test_a_window_without_room_for_a_context_is_an_error(
    ranks: RankPool, model: Path, asked: int | None, number: int
) -> None:
    assert refusal(ConfigError, ranks.run, 1, writing_of, str(model), asked, ("over",)) == (
        "`max_gen_toks` of the task `tiny` must be at most 63, but is "
        f"{number} (lm-eval's default is 256). The model's window of 64 tokens must hold the context and the generated "
        "text. Lower `max_gen_toks` in the task's `generation_kwargs`, or use a model with a longer window."
    )


def test_tasks_give_what_transformers_gives(
    model: Path,
    tasks: Path,
    crosscut: Callable[..., CompletedProcess[str]],
    tmp_path: Path,
) -> None:
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
        (
            ("--harness", "tiny_choise"),
            "`--harness` must name tasks of lm-eval, but `tiny_choise` is unknown. The nearest is `tiny_choice`.",
        ),
        (("--harness", "tiny_choice", "--harness-folder", "nowhere"), "`--harness-folder` must be a folder with task"),
        (("--harness", "tiny_choice", "--text", "a.txt"), "Either files (`--task`, `--text`) or lm-eval tasks"),
        (("--harness", "tiny_choice", "--limit", "-1"), "`--limit` must be at least 0, but is -1."),
    ],
)
def test_a_mistake_is_one_message(model: Path, tasks: Path, options: tuple[str, ...], message: str) -> None:
    folder = () if "--harness-folder" in options else ("--harness-folder", str(tasks))
    result = CliRunner().invoke(commands, ["evaluate", str(model), *folder, *options])
    assert isinstance(result.exception, ConfigError), result.exception
    assert str(result.exception).startswith(message)


def test_their_own_command_runs_ours_on_several_ranks(
    model: Path,
    tasks: Path,
    crosscut: Callable[..., CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    done = crosscut(
        "lm-eval", "--model", "crosscut", "--model_args", f"pretrained={model},tensor=2", "--include_path", str(tasks),
        "--tasks", "tiny_writing", "--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path / "out"),
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|tiny_writing|") == 1, "told once"
    (written,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["results"]["tiny_writing"]["exact_match,none"] == pytest.approx(2 / 3)
    assert found["config"]["model_layout"] == "tensor 2 x data 1"


def made_by_name(folder: str, *options: tuple[str, Any]) -> dict[str, Any]:
    """On a rank: what releases of lm-eval with plugins do with ours, and what the model says of itself."""
    from lm_eval.api.registry import get_model

    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        named = tomllib.load(file)["project"]["entry-points"]["lm_eval.models"]
    ((name, value),) = named.items()
    found = EntryPoint(name, value, "lm_eval.models").load()
    assert get_model(name) is found, "what is imported is registered under the entry point's name"
    lm = found.create_from_arg_string(f"pretrained={folder},precision=float64", dict(options))
    return {**lm.get_model_info(), "batch_size": lm.batch_size, "type": str(next(lm.model.parameters()).dtype)}


def test_they_find_ours_by_its_entry_point(ranks: RankPool, model: Path) -> None:
    options = [("batch_size", "4"), ("max_batch_size", None), ("device", "cpu")]
    (told,) = ranks.run(1, made_by_name, str(model), *options)
    assert told.pop("model_num_parameters") > 0
    assert told == {
        "model_name": "tiny",
        "model_layout": "tensor 1 x data 1",
        "batch_size": 4,
        "type": "torch.float64",
    }


def refusals_of(layout: Layout, folder: str) -> list[str]:
    """On a rank: what the model says to lm-eval's cache and chat templates."""
    from lm_eval.api.model import CacheHook

    lm = ours_of(folder, layout)
    assert lm.chat_template(False) == ""
    told = []
    for ask in (lambda: lm.set_cache_hook(CacheHook(None)), lambda: lm.chat_template(True)):
        try:
            ask()
        except ConfigError as error:
            told.append(str(error))
    return told


def test_a_cache_is_refused_on_several_ranks_and_a_chat_template_always(ranks: RankPool, model: Path) -> None:
    (one,) = ranks.run(1, refusals_of, Layout(), str(model))
    template = (
        "`--apply_chat_template` must be omitted with `--model crosscut`. Crosscut scores every text unchanged. "
        "Remove `--apply_chat_template`."
    )
    assert one == [template]
    cache = (
        "`--use_cache` must be omitted if `--model crosscut` runs on several ranks. lm-eval gives each rank a cache "
        "of its own, and ranks with different cached answers would wait for each other forever. Remove "
        "`--use_cache`."
    )
    for told in ranks.run(2, refusals_of, Layout(tensor=2), str(model)):
        assert told == [cache, *one]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model_args", "tensor=2"), "`--model_args` must name a model, but does not."),
        (("--model_args", "pretrained=a,tensor=2", "--use_cache", "c"), "`--use_cache` must be omitted if"),
        (("--model_args", "pretrained=a", "--apply_chat_template"), "`--apply_chat_template` must be omitted"),
        (("--model_args", "pretrained=nowhere"), "`nowhere` must be"),
    ],
)
def test_a_mistake_in_their_command_is_one_message(
    options: tuple[str, ...], message: str, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    typed = ["lm-eval", "--model", "crosscut", "--tasks", "tiny_choice", "--include_path", str(tasks), *options]
    result = CliRunner().invoke(commands, [*typed, "--device", "cpu"])
    assert isinstance(result.exception, CrosscutError), result.exception
    assert str(result.exception).startswith(message)
