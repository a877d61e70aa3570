import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import PRESETS, ConfigError, load_run
from crosscut.config.system.wording import short
from crosscut.planner import count_parameters
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.search import search_layouts
from tests.cli.conftest import TINY, run_python
from tests.refusals import refusal

PAPER = ("plan", "--model", "8.3B", "--gpus", "512", "--gpu", "v100-32gb-dgx2h")


@pytest.fixture(scope="module", autouse=True)
def _searched_once() -> Iterator[None]:
    """Many tests read the same plan in another form. Search for the layouts of a run once, and compare its model with
    few others on a page.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscut.planner.search.search_layouts", cache(search_layouts))
        patch.setattr("crosscut.planner.paper.figures._OTHERS", ("gpt2-small",))
        patch.setattr("crosscut.planner.paper.figures._LARGER", {})
        yield


def run(*arguments: str) -> str:
    """Run a command in this process and return its output. The error about a user's mistake is raised."""
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def message(*arguments: str) -> str:
    return refusal(ConfigError, CliRunner().invoke, commands, arguments, catch_exceptions=False)


def test_the_table_is_readable_at_a_hundred_columns() -> None:
    text = run(*PAPER, "--tokens", "157B", "--price", "2.5", "--top", "12")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in text
    assert lines[:4] == [
        "8.31 billion parameters on 512 x V100 SXM3 32 GB (DGX-2H), in float16",
        "512 sequences of 1,024 tokens per step",
        "recipe paper (the default from 100M parameters on): learning rate 0.00015",
        "72 layers of attention and gelu",
    ]
    assert sum(" x " in line and "%" in line for line in lines) == 12
    told = " ".join(line.strip() for line in lines)
    assert re.search(
        r"Training for 299,454 steps takes 157B tokens, 8.25 zettaFLOP and, with the first layout, [\d.]+ days. It "
        r"writes checkpoints \(checkpoint.every\): 99.8 GB each, every 1,000 steps \([\d.]+ minutes of training\).",
        told,
    )
    facts = json.loads(run(*PAPER, "--tokens", "157B", "--json"))
    assert facts["training"] == {"tokens": 157e9, "flops": pytest.approx(8.25e21, rel=1e-3)}
    assert facts["checkpoint"] == {"every": 1000, "bytes": pytest.approx(99.8e9, rel=1e-3)}
    assert "  tensor 1 x data 512, not sharded: weights and optimizer need 100 GB per rank; the GPU has 32 GB" in lines


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("model", "gpu"), [("llama3-8b", "h100-sxm"), ("llama3-70b", "h200-sxm")])
def test_days_and_costs_of_long_runs_are_readable(model: str, gpu: str) -> None:
    sizes = ("--model", model, "--gpus", "16", "--gpu", gpu, "training.batch_size=64")
    asked = ("plan", *sizes, "--tokens", "15T", "--price", "2")
    text = run(*asked)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in text
    assert "e+" not in text
    ranked = [line.split() for line in lines if " x " in line and "%" in line]
    best = json.loads(run(*asked, "--json"))["plans"]
    for cells, plan in zip(ranked, best, strict=True):
        days, cost = cells[-2:]
        assert float(days.replace(",", "")) == pytest.approx(plan["budget"]["days"], rel=0.006)
        assert ("," in days) == (plan["budget"]["days"] >= 1000)
        assert cost.endswith(("K", "M"))
        assert float(cost[:-1]) * {"K": 1e3, "M": 1e6}[cost[-1]] == pytest.approx(plan["budget"]["money"], rel=0.006)


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("1e18", "Training for 976,562,500,000,000 steps takes 1e+06T tokens, 11,800 zettaFLOP and, with"),
        ("1", "Training for 1 step takes 1 tokens, 0.0118 gigaFLOP and, with the first layout, "),
    ],
)
def test_any_number_of_tokens_is_planned(tokens: str, told: str) -> None:
    assert told in run("plan", "demo", "--gpu", "laptop", "--tokens", tokens).replace("\n", " ").replace("  ", " ")


def test_a_table_that_is_wider_than_a_hundred_columns_is_whole() -> None:
    currency = "currency" * 5
    text = run(*PAPER, "--tokens", "157B", "--price", f"2.5{currency}")
    assert text.splitlines()[5].endswith(f" {currency}")
    assert "…" not in text


@pytest.mark.parametrize(("number", "text"), [(999.4, "999"), (999.7, "1K"), (999_999, "1M"), (8.31e9, "8.31B")])
def test_a_number_is_rounded_before_its_letter_is_chosen(number: float, text: str) -> None:
    assert short(number) == text


def test_every_heading_and_every_value_is_explained() -> None:
    text = run(*PAPER, "--top", "4")
    legend = text.partition("\n\n")[2].partition("\n\n")[0]
    names = ("tensor x data", "sequence", "sharding", "recompute", "micro-batch", "GB", "step", "compute", "waits")
    for name in (*names, "TF/s", "of peak", "tokens a day"):
        assert f"\n{name} " in f"\n{legend}", name
    ranking = text.partition("\n\n")[0]
    for value in ("split", "zero2", "none", "operators"):
        assert f" {value}" in ranking
        assert f"{value}: " in legend
    assert "whole" not in ranking
    assert "whole: " not in legend, "a value that no layout has"


IN_PAPER = " ".join(PAPER[1:])
SHOWN = {
    "--model gpt2-xl --gpus 16 --gpu h100-sxm training.batch_size=16 --top 100": (
        "zero3/8", "full/2", "/8: in groups of 8 data ranks", "/2: in one of 2 layers",
    ),
    IN_PAPER: ("waits", "do not; the closest are: ", "no bub-", "no have no effect", "no not compiled"),
    "--model 1.2B --gpu b200-sxm training.batch_size=8": ("compute", "no waits"),
    "--gpu h100-sxm --model llama3-8b --gpus 8 training.batch_size=32": (
        "do not; the closest is: tensor 1 x data 8, not", " 79.7* ", " 69.1 ", "*: above 90% of the memory",
        "The first layout without a star is number 3, which is described below: tensor 2 x data 4",
    ),
    "--gpu h100-sxm --model llama3-8b --gpus 8 training.batch_size=32 --top 1": (
        " 79.7* ", " 69.1 ", "is number 3, the last row, which is described below: tensor 2 x data 4, ",
        ", recompute none, micro-batch 2, 69.1 GB, ",
    ),
    "--model laptop-small --gpu laptop training.batch_size=1 training.compile=off": ("5 layouts fit, 0 do not.",),
    f"{IN_PAPER} --top 1": ("no above 90%",),
    "--model llama3-8b --gpu h100-sxm": ("512 sequences of 8,192 tokens per step",),
    "--model llama3-8b --gpu h100-sxm training.sequence_length=2048": ("512 sequences of 2,048 tokens per step",),
    "--model gpt2-medium --gpus 2 --gpu v100-32gb training.batch_size=8 training.recompute=selective layout.tensor=2": (
        "The plan chooses the values of training.recompute, layout.tensor; the run's own layout is described below.",
        "The run's own layout (tensor 2 x data 1, recompute selective, micro-batch 8) needs ", "no costs",
    ),
    "--model gpt2-medium --gpus 2 --gpu v100-32gb training.batch_size=8 layout.tensor=2 --tokens 1B --price 2EUR": (
        " hours and costs 28.5 EUR.",
    ),
    "--model gpt2-medium --gpus 4 --gpu v100-32gb training.batch_size=8 layout.tensor=2": (
        "The plan chooses the values of layout.tensor; the given values have no effect, as their layout has 2 ranks.",
        "no The run's own layout",
    ),
    "--model gpt2-xl --gpus 2 --gpu v100-32gb training.batch_size=512 training.micro_batch_size=256 layout.data=2": (
        "The run's own layout does not fit: ",
        "no selective",  # which is not worth a look on a GPU
    ),
    f"{IN_PAPER} training.sequence_length=1023": (  # which no tensor ranks can split
        "With the first layout, layers are not compiled: dropout under tensor parallelism switches between two random",
    ),
    "--model llama3-8b --gpu a100-80gb --gpus 8 training.sequence_length=8192 training.batch_size=1": (
        "overlap with no matrix product: a micro-batch of 1 sequence cannot be split into halves. ",
        "Use an even micro-batch size, or layout.symmetric_memory=true",
    ),
    "--model llama3-8b --gpu h100-sxm --gpus 8 training.sequence_length=8192 training.batch_size=1 layout.tensor=8 "
    "layout.sequence_parallel=true layout.symmetric_memory=true": ("no no product",),
}  # fmt: skip
"""Words of a command, with texts that it shows. A text after `no ` is not shown."""


@pytest.mark.parametrize("words", SHOWN)
def test_a_plan_shows_what_decides(words: str) -> None:
    text = " ".join(run("plan", *words.split()).split())
    for told in SHOWN[words]:
        assert (told.removeprefix("no ").strip() in text) != told.startswith("no "), told


def test_a_preset_has_its_own_sequences_in_json() -> None:
    facts = json.loads(run("plan", "--model", "qwen3-0.6b", "--gpu", "h100-sxm", "--json"))
    assert facts["sequence_length"] == 4096


def test_a_pipeline_is_told_with_its_stages_and_its_bubble(tmp_path: Path) -> None:
    path, page = tmp_path / "best.toml", tmp_path / "plan.html"
    asked = ("plan", "--model", "llama3-70b", "--gpus", "32", "--gpu", "h100-sxm", "training.batch_size=8")
    text = run(*asked, "--write", str(path), "--html", str(page), "--top", "30")
    assert "ranks that share the layers, in stages (docs/pipeline.md)" in " ".join(text.split())
    assert "bub-ble" in text
    facts = json.loads(run(*asked, "--json", "--top", "30"))["plans"]
    staged = [plan for plan in facts if plan["pipeline"] > 1]
    assert staged
    for plan in staged:
        assert len(plan["stages"]) == plan["pipeline"] * plan["stages_per_rank"]
        assert sum(plan["stages"]) == 80
        assert plan["bubble_share"] == pytest.approx(
            plan["seconds"]["bubble"] / (plan["seconds"]["compute"] + plan["seconds"]["exposed"])
        )
    assert load_run(path).layout.pipeline == facts[0]["pipeline"]
    assert "pipeline" in page.read_text()


def test_a_gpu_of_several_kinds_is_the_most_common_one_and_the_plan_says_so() -> None:
    small = ("plan", "--model", "gpt2-small", "training.batch_size=8", "--gpu", "h100")
    told = (
        "`--gpu h100` matches several devices. This plan is for `h100-sxm`, the most common one. "
        "For another one, type `h100-pcie`."
    )
    lines = run(*small).splitlines()
    assert lines[0] == told
    assert "on 1 x H100 SXM, in " in lines[1]
    result = CliRunner().invoke(commands, (*small, "--json"))
    assert result.stderr.splitlines() == [told]
    assert json.loads(result.stdout)["gpu"]["key"] == "h100-sxm"
    assert "most common" not in run(*small[:-1], "h100-sxm")


def test_recipe_and_learning_rate_are_told_and_written(tmp_path: Path) -> None:
    path, best = tmp_path / "run.toml", tmp_path / "best.toml"

    def told(*arguments: str, sizes: str) -> list[str]:
        path.write_text(f"[model]\n{sizes}")
        options = ("--gpu", "h100-sxm", "--top", "1", "--write", str(best))
        return run("plan", str(path), *arguments, *options).splitlines()[2:3]

    large = "num_layers = 12\nhidden_size = 768\nnum_heads = 12\nvocab_size = 50257\n"
    small = "num_layers = 4\nhidden_size = 256\nnum_heads = 4\n"
    assert told(sizes=large) == ["recipe paper (the default from 100M parameters on): learning rate 0.00015"]
    written = best.read_text()
    assert 'recipe = "paper"' in written and "learning_rate = 0.00015" in written
    assert load_run(best, ["training.seed=7"]).recipe == "paper"
    assert told(sizes=small) == ["recipe small (the default below 100M parameters): learning rate 0.001"]
    assert told("recipe=small", sizes=large) == ["recipe small: learning rate 0.001"]
    modern = ["recipe modern: learning rate 0.006, matrices 0.012, embedding 0.05, head 0.005"]
    assert told("recipe=modern", sizes=small) == modern


def test_a_batch_that_grows_is_planned_whole_and_counts_for_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    ramp = ("training.batch_size=8", "training.initial_batch_size=2", "training.ramp_steps=60")
    asked = ("plan", "--model", "gpt2-small", "--gpu", "h100-sxm", "--gpus", "2", *ramp, "--tokens", "8M")
    text = run(*asked, "--write", str(path))
    assert "8 sequences of 1,024 tokens per step (2 at the start, growing over 60 steps)" in text
    written = load_run(path)
    training = written.training
    assert 8e6 <= training.samples_before(training.steps) * 1024 < 8e6 + 8 * 1024 + 1
    assert (training.ramp_steps, written.layout.data * training.micro_batch_size) == (60, 2)
    assert "a batch of 2 sequences cannot be divided evenly over 4 data ranks" in run(*asked, "--gpus", "4")


def test_checkpoints_of_the_written_run_are_at_most_an_hour_apart_unless_the_user_says_so(tmp_path: Path) -> None:
    asked = ("plan", "--model", "gpt2-small", "--gpus", "2", "--gpu", "laptop", "--write", str(tmp_path / "best.toml"))
    run(*asked)
    assert 1 <= load_run(tmp_path / "best.toml").checkpoint.every < 500
    run(*asked, "checkpoint.every=500")
    assert load_run(tmp_path / "best.toml").checkpoint.every == 500


def test_the_vocabulary_of_the_tokenizer_is_enough(tmp_path: Path) -> None:
    small = ("plan", "--model", "laptop-small", "--gpus", "2", "--gpu", "laptop", "data.vocab_size=4096")
    path = tmp_path / "best.toml"
    text = run(*small, "--write", str(path))
    assert "8 sequences of 256 tokens per step; a vocabulary of 4,096 (data.vocab_size)" in text
    written = load_run(path)
    assert (written.model.vocab_size, written.data.vocab_size) == (0, 4096)
    assert json.loads(run(*small, "--json"))["model"]["vocab_size"] == 4096
    assert "`model.vocab_size` must be at least 1 for a forecast" in message(*small, "data.tokenizer=tokenizer.json")
    assert "a vocabulary of" not in run(*PAPER)


def test_files_that_are_written_are_named_with_the_next_step(tmp_path: Path) -> None:
    best, page = tmp_path / "best.toml", tmp_path / "plan.html"
    files = ("--write", str(best), "--html", str(page))
    small = ("plan", "--model", "gpt2-small", "--gpu", "h100-sxm", "training.batch_size=8")
    told = [
        f"{best}: the run with the first layout. To train it: crosscut train {best} data.text=FILE data.tokenizer=FILE",
        f"{page}: a page with figures of this run. Open it in a browser.",
    ]
    assert run(*small, *files).splitlines()[-2:] == told
    result = CliRunner().invoke(commands, (*small, *files, "--json", "--tokens", "1B", "--price", "2USD"))
    assert result.stderr.splitlines() == told
    assert re.search(r"1B tokens need [\d.]+ days and [\d.]+ USD", page.read_text())
    assert json.loads(result.stdout)["gpus"] == 1
    for data, missing in (
        (("data.text=a.txt",), " data.tokenizer=FILE"),
        (("data.text=a.txt", "data.tokenizer=a.json"), ""),
        (("data.tokens=a",), ""),
        (("model.vocab_size=8192",), " data.text=FILE"),
    ):
        assert run(*small, *files[:2], *data).splitlines()[-1].endswith(f"crosscut train {best}{missing}")
    assert load_run(best).model.num_layers == 12


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("price", "heading", "source"),
    [
        ("2.5USD", "USD", "x 2.5 USD per device and hour (--price)"),
        ("€ 2.50", "€", "x 2.5 € per device and hour (--price)"),
        ("3", "cost", "x 3 per device and hour (--price), in the currency of --price"),
    ],
)
def test_a_cost_has_its_unit_and_its_source(price: str, heading: str, source: str) -> None:
    text = run(*PAPER, "--tokens", "157B", "--price", price)
    assert text.splitlines()[5].endswith(f" {heading}")
    assert f"days x 24 hours x 512 devices {source}" in " ".join(text.split())
    cost = json.loads(run(*PAPER, "--tokens", "157B", "--price", price, "--json"))["plans"][0]["budget"]
    assert cost["currency"] == heading.replace("cost", "")
    assert cost["money"] == pytest.approx(cost["days"] * 24 * 512 * cost["price_per_hour"])


SYMMETRIC = ("layout.tensor=2", "layout.sequence_parallel=true", "layout.symmetric_memory=true")


def test_symmetric_memory_is_told_with_the_layouts_that_have_it() -> None:
    small = ("plan", "--model", "8.3B", "--gpu", "h100-sxm", "--gpus", "8", "training.batch_size=8")
    assert "pieces" in run(*small, *SYMMETRIC)
    assert "pieces" not in run(*small)
    plans = json.loads(run(*small, *SYMMETRIC, "--json"))["plans"]
    assert {plan["symmetric_memory"] for plan in plans if plan["sequence_parallel"]} == {True}
    told = message("plan", "--model", "1.2B", "--gpu", "laptop", *SYMMETRIC)
    assert told == (
        "`layout.symmetric_memory` must be false for a laptop's processor, but is true. Symmetric memory needs GPUs: "
        "remove the setting."
    )


def test_a_faster_cut_into_stages_is_told_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (files("crosscut.planner.hardware") / "h100-sxm.toml").read_text()
    for name, value, limited in [("bytes", 80, 0.7), ("ranks", 8, 4), ("second", 450, 1), ("second", 50, 1)]:
        assert f"{name} = {value}\n" in slow
        slow = slow.replace(f"{name} = {value}\n", f"{name} = {limited}\n")
    (device := tmp_path / "slow.toml").write_text(slow)
    (path := tmp_path / "run.toml").write_text("")
    size = "num_layers=8 hidden_size=1024 num_heads=4 vocab_size=32000 dropout=0"
    asked = [f"model.{setting}" for setting in size.split()]
    asked += ["training.batch_size=16", "training.sequence_length=512", "training.precision=bfloat16"]
    best = tmp_path / "best.toml"
    monkeypatch.setattr("crosscut.planner.search.plans.NEAR_LIMIT", 1.0)  # such a cut pays where memory is short
    text = run("plan", str(path), *asked, "--gpu", str(device), "--gpus", "8", "--write", str(best))
    told = "The first layout has layout.stages=[2, 2, 2, 2], which is faster than a cut into stages of equal FLOPs."
    assert told in " ".join(text.split())
    assert load_run(best).layout.stages == (2, 2, 2, 2)


def test_the_layout_that_is_written_leaves_some_memory_free(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    asked = ("--model", "llama2-7b", "--gpus", "32", "--gpu", "h100-sxm", "training.batch_size=1024")
    text = run("plan", *asked, "--write", str(path))
    assert "The first layout without a star is number 2, which is described below: " in text
    assert "the run with layout 2, the first without a star" in text
    assert load_run(path).layout.sharding == "zero3"


def test_the_checkpoints_of_the_output_are_those_of_the_written_run(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    asked = ("plan", "--model", "gpt2-small", "--gpu", "laptop", "--tokens", "1B")
    text, facts = run(*asked, "--write", str(path)), json.loads(run(*asked, "--write", str(path), "--json"))
    every = load_run(path).checkpoint.every
    assert every < 1000
    assert f" every {every} steps (" in text
    assert facts["checkpoint"]["every"] == every
    assert " every 1,000 steps (" in run(*asked)


def test_a_layout_of_other_ranks_need_not_suit_the_run(tmp_path: Path) -> None:
    path, best = tmp_path / "run.toml", tmp_path / "best.toml"
    path.write_text("[model]\nnum_layers = 8\n[layout]\ntensor = 8\npipeline = 4\n")
    smaller = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "training.batch_size=2")
    run("plan", str(path), *smaller, "--gpus", "2", "--gpu", "laptop", "--write", str(best))
    assert load_run(best).layout.world_size == 2
    assert "`layout.tensor` must divide" in message("plan", str(path), *smaller, "--gpu", "laptop")


def test_a_run_that_must_be_compiled_is_planned_with_what_can_be(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    text = run(*PAPER, "--gpus", "64", "training.batch_size=64", "training.compile=on", "--write", str(path))
    assert '  tensor 2 x data 32: `training.compile` is "on", but dropout under tensor' in text
    assert "not compiled" not in text
    assert load_run(path).layout.sequence_parallel


def test_it_takes_half_a_second_and_imports_neither_torch_nor_numpy() -> None:
    arguments = ("plan", "--model", "gpt2-small", "--gpu", "v100-32gb", "--gpus", "8", "training.batch_size=8")
    done = run_python("-X", "importtime", "-m", "crosscut", *arguments)
    assert done.returncode == 0
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "rich" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "tokenizers", "tomli_w"}


def test_json_has_every_account() -> None:
    facts = json.loads(run(*PAPER, "--json", "--top", "2", "--tokens", "1e12", "--price", "2"))
    assert facts["gpus"] == 512
    assert len(facts["plans"]) == 2 < facts["fitting"]
    best = facts["plans"][0]
    assert best["tensor"] * best["data"] * best["pipeline"] == 512
    memory = {name: held for name, held in best["memory"].items() if name not in ("total", "instant")}
    assert sum(memory.values()) == best["memory"]["total"] < 32e9
    seconds = best["seconds"]
    parts = [seconds[name] for name in ("products", "attention", "passes", "optimizer", "exposed", "bubble")]
    assert sum(parts) == pytest.approx(seconds["total"]) == pytest.approx(seconds["compute"] + seconds["exposed"])
    assert {entry["link"] for entry in best["traffic"]} == {"node", "network"}
    assert best["budget"]["days"] == pytest.approx(1e12 / best["tokens_per_day"])
    assert best["budget"]["money"] == pytest.approx(best["budget"]["days"] * 24 * 512 * 2)
    assert all(rejected["reason"] for rejected in facts["rejected"])


def test_the_best_layout_is_a_run_that_train_reads(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    facts = json.loads(run(*PAPER, "--write", str(path), "--json", "--tokens", "157B"))
    best, written = facts["plans"][0], load_run(path)
    assert (written.layout.tensor, written.layout.data) == (best["tensor"], best["data"])
    assert written.layout.sharding == best["sharding"]
    assert written.training.recompute == best["recompute"]
    assert written.micro_batch_size == best["micro_batch_size"]
    assert written.training.steps == round(157e9 / (512 * 1024))
    assert count_parameters(written.model) == facts["model"]["parameters"]


def test_a_runs_file_is_planned_with_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt2-small"\n[layout]\ndata = 4\n[training]\nbatch_size = 32\n')
    facts = json.loads(run("plan", str(path), "training.precision=bfloat16", "--gpu", "h100-sxm", "--json"))
    assert (facts["gpus"], facts["batch_size"], facts["precision"]) == (4, 32, "bfloat16")


def test_the_page_is_written_also_where_nothing_fits(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    text = run("plan", "--model", "1.2B", "--gpu", "v100-16gb", "training.batch_size=8", "--html", str(path))
    assert "0 layouts fit, " in text
    assert '"points":[]' in path.read_text()


def test_all_presets_and_devices_are_listed_with_their_sizes() -> None:
    lines = {words[0]: words[1:] for words in map(str.split, run("plan", "--list").splitlines()) if words}
    assert {*PRESETS, *KNOWN_HARDWARE} < lines.keys()
    assert lines["codellama-34b"] == ["48", "8,192", "16,384", "33.7B"]
    assert lines["qwen3-30b-a3b"][-2:] == ["30.5B", "3.35B"]
    assert lines["h100-sxm"] == ["80", "3.35", "989", "bfloat16"]


def test_the_lists_are_json_too() -> None:
    lists = json.loads(run("plan", "--json", "--list"))
    assert (lists["presets"].keys(), lists["devices"].keys()) == (PRESETS.keys(), KNOWN_HARDWARE.keys())
    assert lists["presets"]["gpt2-small"]["parameters"] == 124_439_808  # of OpenAI's model
    assert lists["devices"]["h100-sxm"]["flops"]["bfloat16"] == pytest.approx(989e12, rel=1e-3)


def test_a_preset_is_found_by_the_end_of_its_name() -> None:
    for name, parameters in (("1.2b", 1.2), ("megatron-2.5b", 2.5), ("xl", 1.6), ("llama3-8b", 8.0)):
        facts = json.loads(run("plan", "--model", name, "--gpu", "b200-sxm", "--json", "--top", "1"))
        assert round(facts["model"]["parameters"] / 1e9, 1) == parameters


MISTAKES = {
    "--gpus 0": "`--gpus` must be at least 1, but is 0. Set it to the number of devices.",
    "--gpus 9007199254740993": "`--gpus` must be at most 100,000,000, but is 9,007,199,254,740,993. Use fewer devices.",
    "training.device=cpu": '`training.device` must be "auto" or "cuda" on V100 SXM3 32 GB (DGX-2H), but is "cpu". Set '
    "training.device=auto.",
    "--gpu v100": "`--gpu` must name one device, but `v100` matches 3. Choose `v100-16gb`, `v100-32gb` or "
    "`v100-32gb-dgx2h`.",
    "--model 8.4B": "`--model` must name a preset, but is `8.4B`. The nearest is `megatron-8.3b`.",
    "--price 2": "`--price` (2) must be given together with `--tokens`, but `--tokens` is missing. The cost depends on "
    "the number of tokens. Add, for example, `--tokens 300B`.",
    "--gpu laptop": "`--gpus` must be at most 8 for a laptop's processor, but is 512. The device file has no section "
    "[network], so it describes one node of 8 ranks. Use fewer devices, or add a section [network] to your own device "
    "file.",
    "--tokens many": "`--tokens` must be a number above 0 such as 300B or 1.5T, but is `many`.",
    "--tokens 1e400": "`--tokens` must be at most 1e+18, but is `1e400`. Try 300B or 1.5T.",
    "--tokens 2e300T": "`--tokens` must be at most 1e+18, but is `2e300T`. Try 300B or 1.5T.",
    "--tokens 1T --price nan": "`--price` must be a number, with or without a currency, such as 2.5 or 2.5USD, but is "
    "`nan`.",
    "--tokens 1T --price $2€": "`--price` must be a number, with or without a currency, such as 2.5 or 2.5USD, but is "
    "`$2€`.",
    "--tokens 1T --price 1e19": "`--price` must be at least 0 and at most 1e+18, but is 1e+19.",
    "--tokens 1T --price -1": "`--price` must be at least 0 and at most 1e+18, but is -1.",
    "--tokens 0": "`--tokens` must be a number above 0 such as 300B or 1.5T, but is `0`.",
    "training.batch_size=8": "`training.batch_size` must be at least 16, but is 8. A step needs one sequence for each "
    "stage of each data rank, and 512 GPUs with at most 32 tensor ranks have at least 16 such stages. Raise the batch "
    "size, or use at most 256 GPUs.",
    "training.precison=float32": "`training.precison` must be a key of `training`, but there is no such key. The "
    "nearest is `training.precision`.",
}


def test_a_device_of_the_planned_kind_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    for device in ("auto", "cuda"):
        run("plan", "--model", "gpt2-small", "--gpu", "h100-sxm", f"training.device={device}", "--write", str(path))
        assert load_run(path).training.device == device


@pytest.mark.parametrize(("more", "expected"), MISTAKES.items())
def test_nonsense_is_told(more: str, expected: str) -> None:
    assert message(*PAPER, *more.split()) == expected


def test_heads_that_no_tensor_size_divides_are_told() -> None:
    odd = "plan --model gpt2-xl --gpus 8 --gpu v100-16gb model.num_heads=29 model.hidden_size=8700"
    assert message(*odd.split()) == (
        "`model.num_heads` must have a divisor above 1 in common with `--gpus` (8), but is 29. The model does not fit "
        "on one GPU, so several tensor ranks must share it. Try 29 GPUs."
    )


def test_a_preset_may_be_an_override_and_the_help_lists_presets_and_devices() -> None:
    asked = ("--gpu", "laptop", "--gpus", "2", "--json")
    assert run("plan", "model.preset=demo", *asked) == run("plan", "--model", "demo", *asked)
    text = " ".join(run("plan", "--help").split())
    assert all(name in text for name in (*PRESETS, *KNOWN_HARDWARE))


def test_the_closest_layouts_are_sorted_by_the_memory_that_they_need() -> None:
    plans = search_layouts(load_run({"model": {"preset": "llama3-70b"}}), KNOWN_HARDWARE["h100-sxm"], 8)
    needed = [rejected.needed for rejected in plans.leanest if rejected.needed]
    assert needed == sorted(needed)
    assert {rejected.candidate.layout.pipeline > 1 for rejected in plans.leanest} == {True, False}


@pytest.mark.parametrize(
    ("gpus", "batch"),
    [(64, 10**9), (720_720, 7_207_200), (5040, 5040 * 5040), (64, 735_134_400), (55_440, 227_082_240)],
)
def test_a_plan_with_too_many_combinations_is_refused_at_once(gpus: int, batch: int) -> None:
    told = message("plan", "--model", "8.3B", "--gpu", "h100-sxm", "--gpus", str(gpus), f"training.batch_size={batch}")
    assert told.startswith("`training.batch_size` must allow at most 1,250 combinations of layouts and micro-batches,")


def test_what_is_missing_is_told() -> None:
    assert message("plan", "--model", "8.3B").startswith(
        "`--gpu` must name the device to plan for, but is missing. Choose `a100-40gb`, "
    )
    neither = (
        "Exactly one model must be given, as the first argument or with `--model`, but neither is given. To plan a "
        "preset, type its name, such as `8.3B`."
    )
    assert message("plan", "--gpu", "h100-sxm") == neither
    assert message("plan", "run.toml", "--model", "8.3B", "--gpu", "h100-sxm") == neither.replace(
        "neither is", "both are"
    )
    assert message("plan", "--calibrate", "here.txt") == (
        "`--calibrate` must name a .toml file to write, but is `here.txt`. Add the ending .toml."
    )


def test_nothing_to_write_is_told() -> None:
    assert message("plan", "--model", "8.3B", "--gpu", "v100-16gb", "--write", "best.toml") == (
        "`--write` needs a layout that fits, but none does. In the closest layout, weights and optimizer need 100 GB "
        "per rank; the GPU has 16 GB. Try more devices with `--gpus`, or other devices with `--gpu`."
    )


@pytest.mark.parametrize(
    "ignored", ["--model 8.3B", "--gpus 8", "--tokens 1T", "--top 8", "--json", "--dry-run", "--layout data=2"]
)
def test_what_calibration_would_ignore_is_told(ignored: str, tmp_path: Path) -> None:
    option, _, value = ignored.partition(" ")
    assert message("plan", "--calibrate", str(tmp_path / "here.toml"), *ignored.split()) == (
        f"`{option}` must be omitted with `--calibrate`, but is {value or 'given'}. A calibration only measures the "
        f"device. Remove `{option}`."
    )
    assert message("plan", "run.toml", "--calibrate", "here.toml") == (
        "`RUN.toml` must be omitted with `--calibrate`, but is run.toml. A calibration only measures the device. "
        "Remove `RUN.toml`."
    )


@pytest.mark.parametrize("option", ["--html", "--write", "--calibrate"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(option: str, tmp_path: Path) -> None:
    path = tmp_path / "none" / "x.toml"
    assert message("plan", option, str(path)) == (
        f"`{option}` must name a file that can be written, but is `{path}`: No such file or directory. Create its "
        "folder, or name another file."
    )
    assert message("plan", option, str(tmp_path)) == (
        f"`{option}` must name a file, but `{tmp_path}` is a folder. Name a file in the folder."
    )
    assert f"`{tmp_path / ('n' * 300)}`: File name too long." in message("plan", option, str(tmp_path / ("n" * 300)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file" / "report"
    path.parent.touch()
    for study in ("scaling", "measure"):
        assert message("study", study, "--output", str(path)) == (
            f"`--output` must name a writable folder, but is `{path}`: Not a directory. Name another folder."
        )


@pytest.mark.slow
def test_the_best_layout_trains(tmp_path: Path, book: Path) -> None:
    """On two processes of this machine."""
    path, folder = tmp_path / "best.toml", tmp_path / "run"
    asked = tmp_path / "run.toml"
    asked.write_text("[model]\nnum_layers = 2\nhidden_size = 32\nnum_heads = 4\nvocab_size = 300\n")
    overrides = [setting for setting in TINY if not setting.startswith(("model.num", "model.hidden"))]
    where = [f"data.text={book}", f"output.folder={folder}"]
    run("plan", str(asked), *overrides, *where, "--gpus", "2", "--gpu", "laptop", "--write", str(path))
    done = run_python("-m", "crosscut", "train", str(path))
    assert done.returncode == 0, done.stderr
    assert load_run(folder / "config.toml").layout == load_run(path).layout


def test_a_plan_of_a_mixture_tells_active_parameters_expert_ranks_and_the_skew(tmp_path: Path) -> None:
    experts = ("model.layers=['attention experts']", "model.experts.number=16", "model.experts.per_token=4")
    sizes = ("training.batch_size=4", "training.precision=bfloat16", "model.vocab_size=50257")
    asked = ("plan", "--model", "gpt2-small", "--gpus", "4", "--gpu", "h100-sxm", *experts, *sizes)
    page = tmp_path / "plan.html"
    lines = run(*asked, "--expert-skew", "1.5", "--html", str(page)).splitlines()
    assert lines[0].startswith("408 million parameters, 153 million of them for each token, on 4 x H100")
    assert "The fullest rank of each group of expert ranks has 1.5 times the mean load." in lines
    assert "expert ranks" in "\n".join(line.split("  ")[0] for line in lines)
    assert "which have at most 1.5 times the mean load." in page.read_text()
    told = json.loads(run(*asked, "--json", "--top", "1000"))
    assert told["model"]["active_parameters"] < told["model"]["parameters"]
    assert told["expert_skew"] == 1.0
    assert {plan["expert"] for plan in told["plans"]} == {1, 2, 4}
