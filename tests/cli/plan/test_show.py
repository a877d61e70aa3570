import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from crosscut.architecture import Target, describe, layer_parameters
from crosscut.cli.main import commands
from crosscut.config import ConfigError, Layout, LayoutError, load_run
from crosscut.planner.showing import lines, picture, shown
from tests.refusals import refusal
from tests.rehearsal.cases import SMALL, Case

SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(commands, ["show", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def message(error: type[Exception], *arguments: str) -> str:
    return refusal(error, CliRunner().invoke, commands, ["show", *arguments], catch_exceptions=False)


def test_an_mlp_is_shown_with_its_shapes_and_messages() -> None:
    text = run("gpt2-small", "--layout", "tensor=4", "--layer", "11", "model.dropout=0", "training.micro_batch_size=2")
    assert "── layers 0 to 11: attention gelu ──" in text
    start = text.index("  f mlp input")
    assert text[start : text.index("  ● add", start)].splitlines() == [
        "  f mlp input",
        "  ┃   → mlp_norm out, entered             2,048 x 768",
        "  ┃   ↑ all_reduce over 4 tensor ranks: 1,572,864 elements, 3.15 MB",
        "  ● multiply mlp.expand",
        "  ┃   · mlp.expand.weight                 768 x 768 of 3,072 x 768, cut by columns",
        "  ┃   · mlp.expand.bias                   768 of 3,072, cut by columns",
        "  ┃   → mlp expand                        2,048 x 768 of 2,048 x 3,072, cut by columns",
        "  ┃   saves 3.15 MB: mlp_norm out",
        "  ● activate",
        "  ┃   → mlp activated                     2,048 x 768 of 2,048 x 3,072, cut by columns",
        "  ┃   saves 3.15 MB: mlp expand",
        "  ● multiply mlp.contract",
        "  ┃   · mlp.contract.weight               768 x 768 of 768 x 3,072, cut by rows",
        "  ┃   → mlp contract                      2,048 x 768, a summand",
        "  ┃   saves 3.15 MB: mlp activated",
        "  g mlp output",
        "  │   · mlp.contract.bias                 768",
        "  │   → mlp contract, left                2,048 x 768",
        "  │   ↓ all_reduce over 4 tensor ranks: 1,572,864 elements, 3.15 MB",
    ]


def test_the_title_of_a_mixer_that_does_not_attend_says_how_its_module_is_named() -> None:
    assert "── 24 layers from 0 to 50: mamba2 (its module: attention) ──" in run("nemotron-h-8b", "--layer", "0")
    text = run(
        "laptop-small", "--layer", "0", 'model.layers=["gated_delta swiglu gated_delta", "latent_attention gelu"]'
    )
    assert "gated_delta (its module: attention) swiglu gated_delta (its module: attention_2)" in text
    assert "── layers 1 and 3: latent_attention gelu ──" in run(
        "laptop-small", "--layer", "1", 'model.layers=["gated_delta swiglu", "latent_attention gelu"]'
    )


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "show.md").read_text(encoding="utf-8")
    (commands_shown,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (sample,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    first, second = (run(*line.split()[2:]) for line in commands_shown.splitlines())
    assert sample in first
    assert "layers.svg" in second


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_case_is_readable_at_a_hundred_columns_and_drawn(case: Case) -> None:
    found = shown(case.run, device=case.device)
    assert max(map(len, lines(found))) <= 100
    ElementTree.fromstring(picture(found))


def test_what_is_shown_adds_up_to_what_the_planner_counts() -> None:
    for case in SMALL:
        found = shown(case.run, device=case.device)
        decoder, target = describe(case.run.model), Target.of(case.run.layout)
        for block in found.blocks[1:-1]:
            layer = decoder.layers[block.numbers[0]]
            assert block.weight_elements == sum(p.size for p in layer_parameters(layer, target)), case.name
    run_ = load_run({"model": {"preset": "gpt2-small"}}, ["training.recompute=full", "training.recompute_every=2"])
    again, plain = shown(run_, device="cuda").blocks[1:-1]
    assert (again.numbers[:2], plain.numbers[:2]) == ((0, 2), (1, 3))
    assert again.saved_bytes == 1024 * 768 * 2 * run_.micro_batch_size
    assert [any(step.runs_again for step in block.steps) for block in (again, plain)] == [True, False]


def test_json_has_the_tensors_and_messages() -> None:
    told = json.loads(run("mixtral-8x7b", "--layout", "tensor=4,data=2,expert=2", "--layer", "0", "--json"))
    (block,) = told["blocks"]
    weights = {weight["name"]: weight for step in block["steps"] for weight in step["weights"]}
    assert weights["mlp.up"]["shape"] == [4, 3584, 4096]
    assert weights["mlp.up"]["whole"] == [8, 14336, 4096]
    assert weights["mlp.up"]["cut"] == "experts and columns"
    assert [sent["operation"] for sent in block["forward"]] == ["all_reduce"] + 4 * ["all_to_all"] + ["all_reduce"]
    assert block["backward"][-1]["purpose"] == "attention input"


def test_a_picture_colours_the_first_ranks_part(tmp_path: Path) -> None:
    file = tmp_path / "layer.svg"
    assert str(file) in run("gpt2-small", "--layout", "tensor=4", "--layer", "0", "--svg", str(file))
    tree = ElementTree.parse(file).getroot()
    assert [tree.findtext(f"{SVG}{name}") is not None for name in ("title", "desc")] == [True, True]
    assert "Forward, layers 0 to 11: attention gelu sends attention output: all_reduce" in tree.findtext(
        f"{SVG}desc", ""
    )
    parts = [(float(box.get("width", 0)), float(box.get("height", 0))) for box in tree.iter(f"{SVG}rect")]
    whole = next((width, height) for width, height in parts if height == 62)
    assert (whole[0] / 4, whole[1]) in parts
    assert (whole[0], whole[1] / 4) in parts
    sizes = [int(size) for size in re.findall(r"font: (\d+)px", file.read_text(encoding="utf-8"))]
    assert min(sizes) * 358 / float(tree.get("width", 0)) >= 11


def test_a_run_is_shown_from_its_folder(tmp_path: Path) -> None:
    text = '[model]\npreset = "gpt2-small"\n[layout]\ntensor = 2\n'
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    told = json.loads(run(str(tmp_path), "--layer", "0", "--json"))
    assert told["tensor"] == 2
    assert told == json.loads(run(str(tmp_path / "config.toml"), "--layer", "0", "--json"))


@pytest.mark.parametrize(
    ("error", "arguments", "told"),
    [
        (ConfigError, ("llama9",), "or a preset, but is `llama9`. The nearest is `laptop-llama`."),
        (ConfigError, (), "`RUN.toml|FOLDER|PRESET` must name a model, but is missing."),
        (
            ConfigError,
            ("llama3-8b", "--layer", "32"),
            "`--layer` must be the number of a layer, from 0 to 31, but is 32. Try `--layer 0`.",
        ),
        (ConfigError, ("llama3-8b", "--layout", "tensor=x"), "`layout.tensor` must be a whole number, but is 'x'."),
        (
            LayoutError,
            ("llama3-8b", "--layout", "tensor=3"),
            "`layout.tensor` must divide `model.num_heads` (32), but is 3. Try 1, 2, 4, 8, 16 or 32.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_told(error: type[Exception], arguments: tuple[str, ...], told: str) -> None:
    assert told in message(error, *arguments)


def test_a_layout_of_one_rank_sends_nothing() -> None:
    found = shown(load_run({"model": {"preset": "gpt2-small"}}, []), device="cpu")
    assert str(Layout()) == found.layout
    assert not [m for block in found.blocks for m in (*block.forward, *block.backward)]
    assert not [each for block in found.blocks for step in block.steps for each in step.gives if each.cut]
