"""All mistakes of a config are reported together, each with its line."""

import time
from pathlib import Path

import pytest

from crosscut.config import ConfigError, LayoutError, load_corpus, load_layout, load_run
from crosscut.config.loading import with_line
from tests.refusals import refusal

MODEL = "[model]\nnum_layers = 2\nhidden_size = 48\nnum_heads = 6\n"


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loads the run of a TOML text, which must fail; gives the message."""
    monkeypatch.chdir(tmp_path)

    def of(text: str, *overrides: str) -> str:
        Path("run.toml").write_text(text)
        with pytest.raises(ConfigError) as error:
            load_run(Path("run.toml"), overrides)
        return str(error.value)

    return of


def places(told: str) -> list[str]:
    """Beginnings of the lines of a message: the file, the line and the key of each mistake."""
    return [line.split(" must")[0] for line in told.splitlines()]


def test_mistakes_of_the_file_and_the_command_line_are_told_together(message) -> None:
    text = """\
[model]
preset = "gpt2-small"
dropuot = 0.1

[training]
steps = "many"
lr = 1e-3
batch_size = 0

[optimizer]
beta1 = 2.0
"""
    assert (
        message(text, "layout.tenser=2", "--seed=5", "seed")
        == """\
8 settings are wrong:
  run.toml:3: `model.dropuot` must be a key of `model`, but there is no such key. The nearest is `model.dropout`.
  run.toml:6: `training.steps` must be a whole number, but is 'many'.
  run.toml:7: `training.lr` must be a key of `training`, but there is no such key. The nearest is \
`optimizer.learning_rate`.
  run.toml:8: `training.batch_size` must be at least 1, but is 0.
  run.toml:11: `optimizer.beta1` must be at least 0 and below 1, but is 2.0.
  `--seed` must be an option of this command, but there is no such option. Settings are written without dashes: \
training.seed=5.
  An override must be `section.key=value`, but is `seed`.
  `layout.tenser` must be a key of `layout`, but there is no such key. The nearest is `layout.tensor`."""
    )


def test_a_misspelt_preset_hides_no_other_mistake(message) -> None:
    """The nearest preset stands for it. If there is none, settings that the preset would give are not refused."""
    others = "dropuot = 0.1\nnorm = 3\n[layout]\ntensor = 5\n[training]\nsteps = -1\n"
    told = message(f'[model]\npreset = "gpt2-smal"\n{others}')
    assert told.startswith(
        "5 settings are wrong:\n  run.toml:2: `model.preset` must name a preset, but is 'gpt2-smal'."
    )
    for name in (
        "`model.dropuot` must be a key",
        "`model.norm` must be",
        "`layout.tensor` must divide `model.num_heads`",
    ):
        assert name in told
    told = message(f'[model]\npreset = "zzz"\n{others}')
    assert told.startswith("4 settings are wrong:\n  run.toml:2: `model.preset` must name a preset, but is 'zzz'.")
    assert "`model.num_heads`" not in told


def test_a_single_mistake_has_its_line_and_its_class(message, tmp_path: Path) -> None:
    text = f"{MODEL}[layout]\n\ntensor = 4\n"
    told = message(text)
    assert told == "run.toml:7: `layout.tensor` must divide `model.num_heads` (6), but is 4. Try 1, 2, 3 or 6."
    with pytest.raises(LayoutError):
        load_run(tmp_path / "run.toml")


def test_a_value_of_the_command_line_has_no_line(message) -> None:
    text = f"{MODEL}[layout]\n\ntensor = 4\n"
    assert message(text, "layout.tensor=5").startswith("`layout.tensor` must divide `model.num_heads` (6), but is 5.")


def test_several_conditions_between_sections_are_told(message) -> None:
    training = "[optimizer]\nwarmup_steps = 9\n[training]\nsteps = 5\nbatch_size = 4\n"
    text = f"{MODEL}[layout]\ntensor = 4\ndata = 3\n{training}"
    assert places(message(text)) == [
        "3 settings are wrong:",
        "  run.toml:6: `layout.tensor`",
        "  run.toml:9: `optimizer.warmup_steps`",
        "  run.toml:12: `training.batch_size`",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("[training]\nsteps = true\n[optimizer]\nwarmup_steps = 400_000\n", 1),  # more than the default of the steps
        ("[training]\nstep = 500_000\n[optimizer]\nwarmup_steps = 400_000\n", 1),
        ("[optimizer]\nlr = 1.0\nmin_learning_rate = 0.5\n", 1),
        ('[training]\nrecompute = "whole"\noffload = ["activations"]\n', 1),
        ("[layout]\ntensor = 0\nsharding = 5\n[training]\nbatch_size = 7\n", 2),
    ],
)
def test_what_only_follows_from_a_mistake_is_not_told(message, text: str, number: int) -> None:
    lines = message(MODEL + text).splitlines()
    assert len(lines) == (1 if number == 1 else number + 1), lines


def test_a_broken_model_does_not_hide_other_mistakes(message) -> None:
    told = message('[model]\npreset = "gpt2-smal"\n[training]\nsteps = 0\n')
    assert places(told)[1:] == [
        "  run.toml:2: `model.preset`",
        "  run.toml:4: `training.steps`",
    ]
    told = message("[model]\nnum_layers = 2\nhidden_size = 0\n[training]\nsteps = 0\n")
    assert places(told)[1:] == [
        "  run.toml:1: `model.num_heads`",
        "  run.toml:3: `model.hidden_size`",
        "  run.toml:5: `training.steps`",
    ]


@pytest.mark.parametrize(
    ("size", "first"),
    [
        ("hiden_size = 64", "  run.toml:2: `model.hiden_size`"),
        ("# no hidden size", "  run.toml:1: `model.hidden_size`"),
        ('hidden_size = "64"', "  run.toml:2: `model.hidden_size`"),
        ("hidden_size = 0", "  run.toml:2: `model.hidden_size`"),
    ],
)
def test_a_size_that_is_misspelt_missing_or_wrong_hides_no_other_mistake(message, size: str, first: str) -> None:
    told = message(
        f"[model]\n{size}\nnum_layers = 2\nnum_heads = 4\ndropout = 1.5\nlearning_rate = 1e-3\n"
        '[training]\nsteps = "sixty"\n[layout]\ntensor = 3\n'
    )
    assert places(told) == [
        "5 settings are wrong:",
        first,
        "  run.toml:5: `model.dropout`",
        "  run.toml:6: `model.learning_rate`",
        "  run.toml:8: `training.steps`",
        "  run.toml:10: `layout.tensor`",
    ]
    assert told.endswith("`layout.tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4.")


def test_several_missing_sizes_are_told_in_one_message(message) -> None:
    told = message("[model]\nhidden_size = 64\nmlp_size = 100\n[layout]\ntensor = 3\n")
    assert told.startswith("run.toml:1: `model.num_layers` and `model.num_heads` must be given, but are missing.")


def test_a_folder_without_a_model_is_one_mistake(message, tmp_path: Path) -> None:
    told = message('[training]\n\ninitialize_from = "empty"\n')
    assert told.startswith("run.toml:3: `empty/config.json` must be a readable file, but is not: ")
    assert len(told.splitlines()) == 1


def test_an_unknown_section_is_told_key_by_key(message) -> None:
    told = message(f"{MODEL}[optim]\nlr = 1.0\nwd = 0.0\n").splitlines()[1:]
    told_of = "must be a key of a run, but there is no such key. The nearest is"
    assert told == [
        f"  run.toml:6: `optim.lr` {told_of} `optimizer.learning_rate`.",
        f"  run.toml:7: `optim.wd` {told_of} `optimizer.weight_decay`.",
    ]


def test_an_item_of_an_array_has_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.toml").write_text(
        'folder = "out"\n[[sources]]\nname = "a"\nfiles = ["a"]\n[[sources]]\nname = "b c"\nfiles = ["b"]\nwieght = 2\n'
    )
    assert places(refusal(ConfigError, load_corpus, Path("corpus.toml"), ["ngram=0"])) == [
        "3 settings are wrong:",
        "  corpus.toml:6: `sources.name`",
        "  corpus.toml:8: `sources.wieght`",
        "  `ngram`",
    ]


def test_all_mistakes_of_a_layout_are_told() -> None:
    assert places(refusal(ConfigError, load_layout, "tensor=0,dat=2,sharding=zero9")) == [
        "3 settings are wrong:",
        "  `layout.dat`",
        "  `layout.tensor`",
        "  `layout.sharding`",
    ]


def test_a_later_error_is_placed_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'{MODEL}[data]\ntext = "gone.txt"\n')
    told = "`data.text` must name existing files, but nothing matches `gone.txt`."
    assert with_line(told, path) == f"{path}:6: {told}"
    assert with_line(f"{path}:6: {told}", path) == f"{path}:6: {told}"
    assert with_line(told, path, ["data.text=gone.txt"]) == told
    assert with_line("`runs/demo` must be a run's folder.", path) == "`runs/demo` must be a run's folder."


def test_mistakes_without_number_are_told_in_part_and_at_once() -> None:
    names = [f"key{number}" for number in range(20_000)]
    begin = time.monotonic()
    assert refusal(ConfigError, load_run, {"model": dict.fromkeys(names, 1)}).count("must be a key of `model`") == 100
    with pytest.raises(ConfigError, match=r"`data.mixture` must have at most 1,000 sections, but has 20,000. Remove"):
        load_run({"data": {"mixture": [{name: 1} for name in names]}})
    assert time.monotonic() - begin < 10
