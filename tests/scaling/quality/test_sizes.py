"""Sizes of a study, and mistakes in their run files."""

from pathlib import Path

import pytest

from crosscut.config import ConfigError
from crosscut.planner import count_parameters
from crosscut.scaling.quality.sizes import load_sizes
from tests.refusals import refusal


def written(folder: Path, **widths: int) -> list[str]:
    """Run files that differ in the width."""
    for name, width in widths.items():
        (folder / f"{name}.toml").write_text(f"[model]\nnum_layers = 1\nhidden_size = {width}\nnum_heads = 1\n")
    return [str(folder / f"{name}.toml") for name in widths]


def test_without_files_three_sizes_of_gpt2_differ_in_the_width_alone() -> None:
    sizes = load_sizes(["training.steps=70", "model.vocab_size=4096"])
    assert [(size.name, size.run.model.hidden_size) for size in sizes] == [
        ("small", 32),
        ("medium", 64),
        ("large", 128),
    ]
    assert {size.run.training.steps for size in sizes} == {70}
    assert {size.run.data.text for size in sizes} == {("builtin:state-of-the-union",)}
    numbers = [count_parameters(size.run.model) for size in sizes]
    assert numbers == sorted(numbers) and numbers[2] > 5 * numbers[0]
    assert load_sizes(["data.tokens=tokens"])[0].run.data.text == ()


def test_each_file_is_a_size_and_overrides_apply_to_all(tmp_path: Path) -> None:
    sizes = load_sizes([*written(tmp_path, tiny=16, wide=32), "training.steps=50"])
    assert [(size.name, size.run.model.hidden_size, size.run.training.steps) for size in sizes] == [
        ("tiny", 16, 50),
        ("wide", 32, 50),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "[training]\nsteps = 7": "`training.steps` must be the same for all sizes, but is 500 for `tiny` and 7 for "
        "`wide`. Change one file, or override it for all: training.steps=VALUE.",
        '[data]\ntext = ["other.txt"]': "`data.text` must be the same for all sizes, but is [] for `tiny` and "
        "['other.txt'] for `wide`. Change one file, or override it for all: data.text=VALUE.",
        '[evaluation]\nlambada = "l.jsonl"': "`evaluation.lambada` must be the same for all sizes, but is '' for "
        "`tiny` and 'l.jsonl' for `wide`. Change one file, or override it for all: evaluation.lambada=VALUE.",
        "[optimizer]\nlearning_rate = 0.0\nmin_learning_rate = 0.0": "`optimizer.learning_rate` must be above 0, but "
        "is 0 for `wide`. Remove it to use the default.",
    }.items(),
)
def test_sizes_that_cannot_be_compared_are_refused(tmp_path: Path, line: str, message: str) -> None:
    files = written(tmp_path, tiny=16, wide=32)
    with (tmp_path / "wide.toml").open("a") as file:
        file.write(line)
    assert refusal(ConfigError, load_sizes, files) == message


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    files = [*written(tmp_path, tiny=16), *written(tmp_path / "a", tiny=32)]
    assert refusal(ConfigError, load_sizes, files) == (
        "The run files must have different names, but 2 are called `tiny`. Rename one: the name of the file is the "
        "name of the size."
    )


def test_a_bert_without_masks_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, tiny=16)
    bert = ("model.head=masked_tokens", "model.attention=bidirectional")
    assert "`data.objective` must be" in refusal(ConfigError, load_sizes, [*files, *bert])
