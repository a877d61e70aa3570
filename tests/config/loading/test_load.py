import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config import (
    PRESETS,
    ConfigError,
    DataConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    TrainingConfig,
    dump_toml,
    load_layout,
    load_run,
    write_toml,
)
from crosscut.config.precision import Precision
from crosscut.config.published.presets import sequence_length_of

MODEL = {"num_layers": 2, "hidden_size": 48, "num_heads": 6}
KNOWN_PRESETS = f"{', '.join(list(PRESETS)[:-1])} or {list(PRESETS)[-1]}"


def message_of(source: Path | dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run(source, overrides)
    return str(error.value)


def with_model(**sections: Any) -> dict[str, Any]:
    return {"model": MODEL, **sections}


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
rates = st.floats(1e-12, 1e3)


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    tensor, data, heads = (draw(st.integers(1, 8)) for _ in range(3))
    micro_batch_size, micro_batches = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    sequence_length = tensor * draw(st.integers(1, 64))
    low, high = sorted(draw(st.tuples(rates, rates)))
    return RunConfig(
        model=ModelConfig(
            num_layers=draw(st.integers(1, 99)),
            hidden_size=tensor * heads * draw(st.integers(1, 99)),
            num_heads=tensor * heads,
            vocab_size=draw(st.integers(0, 2**31 - 1)),
            max_sequence_length=sequence_length + draw(st.integers(0, 99)),
            dropout=draw(st.floats(0, 1, exclude_max=True)),
        ),
        layout=Layout(tensor=tensor, data=data, sequence_parallel=draw(st.booleans())),
        data=DataConfig(text=tuple(draw(st.lists(texts, max_size=3))), tokens=draw(texts), verify=draw(st.booleans())),
        training=TrainingConfig(
            batch_size=data * micro_batch_size * micro_batches,
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            precision=draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"])),
        ),
        optimizer=OptimizerConfig(learning_rate=high, min_learning_rate=low),
        output=OutputConfig(sample_prompt=draw(texts)),
    )


@settings(max_examples=30)
@given(runs())
def test_a_dumped_run_loads_as_the_same_run(run: RunConfig) -> None:
    assert load_run(tomllib.loads(dump_toml(run))) == run


def test_a_written_run_loads_as_the_same_run(tmp_path: Path) -> None:
    run = load_run(with_model(output={"sample_prompt": 'Ça va?\n"quoted" \\ \t'}))
    write_toml(run, tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml") == run
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_written_run_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_toml(load_run(with_model()), path)
    other = load_run(with_model(training={"seed": 7}))
    write_toml(other, path)
    assert load_run(path) == other


def test_a_dump_holds_every_field() -> None:
    run = load_run(with_model())
    dumped = tomllib.loads(dump_toml(run))
    assert dumped.pop("recipe") == run.recipe == "small"
    assert [*dumped] == [field.name for field in dataclasses.fields(run) if field.name != "recipe"]
    for section in (field for field in dataclasses.fields(run) if field.name != "recipe"):
        names = {field.name for field in dataclasses.fields(getattr(run, section.name))}
        assert set(dumped[section.name]) == names


def test_what_is_not_given_has_its_default() -> None:
    assert load_run(with_model(recipe="paper")) == RunConfig(model=ModelConfig(**MODEL))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_model_that_it_names(name: str) -> None:
    assert load_run({"model": {"preset": name}}, ["training.sequence_length=1"]).model == ModelConfig(**PRESETS[name])


def test_fields_beside_a_preset_change_it() -> None:
    model = load_run({"model": {"preset": "gpt2-small", "dropout": 0.0}}).model
    assert model == ModelConfig(**{**PRESETS["gpt2-small"], "dropout": 0.0})


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (["model.preset=llama3-8b"], 8192),
        (["model.preset=qwen3-0.6b"], 4096),
        (["model.preset=laptop-tiny"], 128),
        (["model.preset=llama3-8b", "training.sequence_length=512"], 512),
        (["model.preset=llama3-8b", "model.max_sequence_length=2048"], 2048),
        (["model.preset=llama3-8b", "model.max_sequence_length=131072"], 8192),
    ],
)
def test_a_preset_sets_the_length_of_the_sequences(overrides: list[str], length: int) -> None:
    assert load_run({}, overrides).training.sequence_length == length


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_run(name: str) -> None:
    run = load_run({"model": {"preset": name}})
    assert run.training.sequence_length == sequence_length_of(name) <= run.model.max_sequence_length


def test_loading_leaves_the_table_and_the_presets_alone() -> None:
    table = {"model": {"preset": "gpt2-small"}}
    before = {name: dict(fields) for name, fields in PRESETS.items()}
    load_run(table, ["model.num_layers=2"])
    assert table == {"model": {"preset": "gpt2-small"}}
    assert before == PRESETS


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("training.steps=4_000", "training", "steps", 4000),
        ("training.steps=3001", "training", "steps", 3001),
        ("optimizer.learning_rate=3e-4", "optimizer", "learning_rate", 3e-4),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("layout.sequence_parallel=true", "layout", "sequence_parallel", True),
        ("training.precision=bfloat16", "training", "precision", Precision.BFLOAT16),
        ('training.precision="bfloat16"', "training", "precision", Precision.BFLOAT16),
        ("output.folder=runs/a=b", "output", "folder", "runs/a=b"),
        ("output.sample_prompt=1984", "output", "sample_prompt", "1984"),
        ("output.folder=2026-01-01", "output", "folder", "2026-01-01"),
        ("output.sample_prompt=", "output", "sample_prompt", ""),
        ("output.sample_prompt=5\nseed=6", "output", "sample_prompt", "5\nseed=6"),
        ("data.text=my book.txt", "data", "text", ("my book.txt",)),
        ("data.text=['a.txt', 'b.txt']", "data", "text", ("a.txt", "b.txt")),
    ],
)
def test_an_override_sets_a_field(override: str, section: str, field: str, value: object) -> None:
    loaded = getattr(getattr(load_run(with_model(), [override]), section), field)
    assert loaded == value
    assert type(loaded) is type(value)


def test_an_override_beats_the_file_and_the_later_one_the_earlier(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt2-small"\n[training]\nseed = 1\n')
    assert load_run(path, ["training.seed=2"]).training.seed == 2
    assert load_run(path, ["training.seed=2", "training.seed=3"]).training.seed == 3
    assert load_run(path, ["model.preset=gpt2-xl"]).model.num_layers == 48


def test_a_preset_of_an_override_is_the_model_whatever_a_file_spells_out() -> None:
    spelled_out = {"model": {**MODEL, "vocab_size": 300, "dropout": 0.0}}
    assert load_run(spelled_out, ["model.preset=gpt2-xl"]).model == ModelConfig(**PRESETS["gpt2-xl"])
    both = load_run(spelled_out, ["model.num_layers=3", "model.preset=gpt2-xl"]).model
    assert both == ModelConfig(**{**PRESETS["gpt2-xl"], "num_layers": 3})
    assert spelled_out["model"]["num_layers"] == MODEL["num_layers"], "the table is left alone"


def test_fields_of_a_file_beside_its_preset_change_that_of_an_override() -> None:
    model = load_run({"model": {"preset": "gpt2-small", "dropout": 0.0}}, ["model.preset=gpt2-xl"]).model
    assert model == ModelConfig(**{**PRESETS["gpt2-xl"], "dropout": 0.0})


def test_a_model_that_is_no_section_is_refused_beside_a_preset_too() -> None:
    assert message_of({"model": 5}, "model.preset=gpt2-xl").startswith("`model.preset` must name a key of a section")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert (
        message_of(path) == f"`{path}` must be a TOML file, but does not exist. Try `examples/gpt2-small.toml`, or "
        "leave out the file to run the demo."
    )


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"`{tmp_path}` must be a readable TOML file, but is not: Is a directory."


TWICE = "must be given once, but is given twice."
NOT_TOML = {
    "[training]\nsteps = 1\nsteps = 2\nseed = 1\n": f"3: `training.steps` {TWICE}",
    "[training]\nsteps = 1\nsteps = 2": f"3: `training.steps` {TWICE}",
    "[training]\nsteps = 1\n[training]\nseed = 2\n": f"3: `training` {TWICE}",
    "[output]\nfolder = runs\n": "2: `folder = runs` must be valid TOML, but is not: Invalid value (column 10). "
    "Strings need quotes;",
    "[model\n": "1: `[model` must be valid TOML, but is not: Expected ']' at the end of a table declaration",
    "[data]\ntext = [\n": "2: `text = [` must be valid TOML, but is not: ",
}


@pytest.mark.parametrize("text", NOT_TOML)
def test_a_file_that_does_not_parse_is_named_with_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message_of(path).startswith(f"{path}:{NOT_TOML[text]}")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    assert message_of(path).startswith(f"`{path}` must be valid TOML, but is not: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize("override", ["training.steps", "=5", ""])
def test_an_override_is_a_name_and_a_value(override: str) -> None:
    assert message_of(with_model(), override) == f"An override must be `section.key=value`, but is `{override}`."


def test_an_override_does_not_reach_into_a_value() -> None:
    assert message_of(with_model(training={"steps": 5000}), "training.steps.more=1") == (
        "`training.steps.more` must name a key of a section, but `steps` is a value."
    )


TABLE_MESSAGES = {
    "training.step = 5": "`training.step` must be a key of `training`, but there is no such key. The nearest is "
    "`training.steps`.",
    "layout.zzz = 5": "`layout.zzz` must be a key of `layout`, but there is no such key. Choose `tensor`, `data`, "
    "`context`, `context_attention`, `pipeline`, `schedule`, `stages_per_rank`, `stages`, `expert`, "
    "`sequence_parallel`, `sharding`, `shard_group`, `symmetric_memory` or `elastic`.",
    "model.prest = 'gpt2-small'": "`model.prest` must be a key of `model`, but there is no such key. The nearest is "
    "`model.preset`.",
    "[trainin]": "`trainin` must be a section of a run, but there is no such key. The nearest is `training`.",
    "model.preset = 'gpt2-smal'": "`model.preset` must name a preset, but is 'gpt2-smal'. The nearest is `gpt2-small`.",
    "model = 5": "`model` must be a section, but is 5. The nearest is `model.preset`.",
    "training = [1]": "`training` must be a section, but is [1].",
    "training.steps = 1.5": "`training.steps` must be a whole number, but is 1.5.",
    "training.steps = true": "`training.steps` must be a whole number, but is true.",
    "training.recompute = true": "`training.recompute` must be 'none', 'selective', 'operators' or 'full', but is "
    "true.",
    "optimizer.beta1 = '0.9'": "`optimizer.beta1` must be a number, but is '0.9'.",
    "data.verify = 1": "`data.verify` must be true or false, but is 1.",
    "output.folder = 3": "`output.folder` must be a string, but is 3.",
    "data.text = ['a', 1]": "`data.text` must be a list of strings, but is ['a', 1].",
    "data.text = 1": "`data.text` must be a list of strings, but is 1.",
    "layout.tensor = 0": "`layout.tensor` must be at least 1, but is 0.",
}


@pytest.mark.parametrize("text", TABLE_MESSAGES)
def test_a_table_that_cannot_be_says_why(text: str) -> None:
    given = tomllib.loads(text)
    assert message_of(given if "model" in given else with_model(**given)) == TABLE_MESSAGES[text]


@pytest.mark.parametrize("name", ["zzz", ["gpt2-small"], 5])
def test_a_preset_that_nothing_resembles_gives_the_list(name: object) -> None:
    known = KNOWN_PRESETS.replace(", ", "`, `").replace(" or ", "` or `")
    assert message_of({"model": {"preset": name}}).startswith(f"`model.preset` must name a preset, but is {name!r}.")
    if name == "zzz":
        assert message_of({"model": {"preset": name}}).endswith(f" Choose `{known}`.")


MISSING = {
    "": "`model` must be given, but is missing.",
    "[training]": "`model` must be given, but is missing.",
    "[model]": "`model.num_layers`, `model.hidden_size` and `model.num_heads` must be given, but are missing.",
    "model = {num_layers = 2, num_heads = 4}": "`model.hidden_size` must be given, but is missing.",
}


@pytest.mark.parametrize("text", MISSING)
def test_a_run_without_a_model_says_what_to_give(text: str) -> None:
    assert message_of(tomllib.loads(text)) == (
        f"{MISSING[text]} Give `model.num_layers`, `model.hidden_size` and `model.num_heads`, or a `model.preset` such "
        "as `gpt2-small`, `llama3-8b` or `demo` (docs/configuration.md lists all presets)."
    )


def test_a_layout_is_told_in_one_line():
    told = "tensor=2,data=4,sharding=zero3,shard_group=2,sequence_parallel=true"
    expected = Layout(tensor=2, data=4, sharding="zero3", shard_group=2, sequence_parallel=True)
    assert load_layout(told) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"training.steps={'9' * 5000}", "`training.steps` must be a whole number, but is '999"),
        (f"training.steps=0x{'f' * 5000}", "`training.steps` must be between -2^63 and 2^63, but is too large"),
        (f"training.steps={'9' * 400}", "`training.steps` must be between -2^63 and 2^63, but is 999"),
        (f"optimizer.learning_rate={'9' * 400}", "`optimizer.learning_rate` must be a number, but is 999"),
        (f"training.steps={2**31}", "`training.steps` must be at most 2,147,483,647, but is 2,147,483,648."),
        ("optimizer.clip_norm=nan", "`optimizer.clip_norm` must be a number, but is nan."),
        ("optimizer.learning_rate=1e999", "`optimizer.learning_rate` must be at most 2,147,483,647, but is inf."),
        ("model.rotary_factor=inf", "`model.rotary_factor` must be at most 2,147,483,647, but is inf."),
        ("model.num_layers=1000000000", "`model.num_layers` must be at most 10,000, but is 1,000,000,000."),
        ("output.folder=\udcff", "`output.folder` must be UTF-8 text, but is '\\udcff'."),
        (
            'output.folder="a\\u0000b"',
            "`output.folder` must not contain a NUL character, but is 'a\\x00b'. Remove the character.",
        ),
        ('training.initialize_from="\\u0000"', "`training.initialize_from` must not contain a NUL character, but is"),
        ('data.text=["a", "b\\u0000"]', "`data.text` must not contain a NUL character, but is 'b\\x00'."),
        (f"training.steps={'[' * 100_000}", "`training.steps` must be a whole number, but is '[["),
        ("training.steps." + "a." * 5000 + "a=1", "`training.steps` must be a whole number, but is"),
    ],
    ids=lambda text: text[:40],
)
def test_value_that_no_run_can_have_is_told(override, message):
    told = message_of(with_model(), override)
    assert told.startswith(message)
    assert len(told) < 500


@pytest.mark.parametrize(
    "setting",
    [
        "data.text", "data.tokens", "data.tokenizer", "training.initialize_from", "training.skips",
        "evaluation.wikitext103", "evaluation.lambada", "evaluation.text", "output.folder",
    ],
)  # fmt: skip
def test_a_url_is_no_path_on_this_machine(setting):
    assert message_of(with_model(), f"{setting}=s3://bucket/run") == (
        f"`{setting}` must be a path on this machine, but is 's3://bucket/run'. Only `checkpoint.folder` and the "
        "`files` of a corpus can be URLs. Name a path, such as that of a mounted store."
    )


def test_checkpoints_may_be_elsewhere_and_folders_of_a_mixture_may_not():
    assert load_run(with_model(), ["checkpoint.folder=s3://bucket/run"]).checkpoints_folder == "s3://bucket/run"
    told = message_of(with_model(data={"mixture": [{"folder": "s3://bucket/tokens", "weight": 1.0}]}))
    assert told.startswith("`data.mixture.folder` must be a path on this machine, but is 's3://bucket/tokens'. ")


LISTS = {
    "a.txt,b.txt": ("a.txt", "b.txt"),
    "[a.txt,b.txt]": ("a.txt", "b.txt"),
    "[ a.txt , b.txt, ]": ("a.txt", "b.txt"),
    "a.txt, b.txt": ("a.txt", "b.txt"),
    '["a.txt","b.txt"]': ("a.txt", "b.txt"),
    '"a,1.txt",b.txt': ("a,1.txt", "b.txt"),
    "['a,1.txt', b.txt]": ("a,1.txt", "b.txt"),
    "[a.txt]": ("a.txt",),
    "1984,1985": ("1984", "1985"),
    "1984": ("1984",),
    "my book.txt,it's.txt": ("my book.txt", "it's.txt"),
    "books/*.txt,c[12].txt": ("books/*.txt", "c[12].txt"),
    "builtin:state-of-the-union,a.txt": ("builtin:state-of-the-union", "a.txt"),
    "[]": (),
    "a.txt,": ("a.txt", ""),
}


@pytest.mark.parametrize("typed", LISTS)
def test_a_list_on_the_command_line_needs_no_quotes(typed: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").touch()  # as a glob, [a.txt,b.txt] would match this file
    assert load_run(with_model(), [f"data.text={typed}"]).data.text == LISTS[typed]
    assert load_run(with_model(), [f"evaluation.text={typed}"]).evaluation.text == LISTS[typed]


@pytest.mark.parametrize("name", ["a.txt,b.txt", "[a.txt,b.txt]", "a, b.txt"])
def test_a_file_whose_name_contains_the_comma_wins(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (name, "a.txt", "b.txt"):
        (tmp_path / file).touch()
    assert load_run(with_model(), [f"data.text={name}"]).data.text == (name,)
    if not name.startswith("["):
        assert load_run(with_model(), [f"data.text=c.txt,{name},a.txt"]).data.text == ("c.txt", name, "a.txt")
        assert load_run(with_model(), [f"data.text=[{name},c.txt]"]).data.text == (name, "c.txt")
        assert load_run(with_model(), [f"data.text={name[:-5]}*"]).data.text == (f"{name[:-5]}*",)


def test_lists_of_numbers_and_of_names_need_no_quotes() -> None:
    run = load_run(with_model(), ["layout.pipeline=2", "layout.stages=1,1", "model.layers=attention gelu,relu2"])
    assert (run.layout.stages, run.model.layers) == ((1, 1), ("attention gelu", "relu2"))
    assert load_run(with_model(), ["training.offload=[optimizer]"]).training.offload == ("optimizer",)
    with pytest.raises(ConfigError, match=r"`layout.stages` must be a list of integers"):
        load_run(with_model(), ["layout.stages=1,x"])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.zst", "a.tsv", "a.parquet"])
def test_text_in_place_of_a_config_names_the_setting(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xffonce upon a time" if name.endswith(("z", "t", "d")) else b"once upon a time")
    assert message_of(tmp_path / name) == (
        f"`{tmp_path}/{name}` must be a TOML file, but its name is that of a text. To train on it, type "
        f"data.text={tmp_path}/{name}."
    )
