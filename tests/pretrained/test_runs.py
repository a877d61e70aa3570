"""Runs that start from published weights, and what becomes of them: checkpoints found, loaded and exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import CheckpointError, ConfigError, DataError, EvaluationConfig, Layout, RunConfig, load_run
from crosscut.evaluation.places import evaluate_place
from crosscut.evaluation.ranks import Machinery
from crosscut.logbook.contents import read_metrics
from crosscut.pretrained import ModelSource, find_model
from crosscut.training import run_training
from tests.pretrained import jobs
from tests.pretrained.models import edit
from tests.pretrained.test_export import assert_same_tensors
from tests.refusals import refusal
from tests.training.jobs import whole_run


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "foxes.jsonl"
    path.write_text('{"text": "the quick brown fox jumps over the lazy dog, again and again and again"}\n' * 60)
    return path


def make_run(folder: Path, text: Path, out: Path, *overrides: str) -> RunConfig:
    """A run that changes nothing: its learning rate is 0."""
    table = {
        "data": {"text": [str(text)], "num_shards": 1},
        "training": {
            "initialize_from": str(folder), "steps": 1, "batch_size": 2, "sequence_length": 16,
            "validation_sequences": 2, "precision": "float32",
        },
        "optimizer": {"learning_rate": 0.0, "min_learning_rate": 0.0, "warmup_steps": 0},
        "output": {"folder": str(out), "sample_tokens": 0},
    }  # fmt: skip
    return load_run(table, overrides)


@pytest.fixture(scope="module")
def trained(published, text, tmp_path_factory) -> Path:
    """The folder of such a run of the tied Llama, with a copy of the folder that it started from beside it."""
    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(published("llama tied"), root / "initial")
    edit(root / "initial", eos_token_id=[0, 11])
    (root / "initial" / "chat_template.jinja").write_text("{{ messages }}")
    run_training(make_run(root / "initial", text, root / "run"))
    return root


@pytest.fixture
def moved(trained, tmp_path) -> Path:
    """A copy of the run's folder, elsewhere."""
    shutil.copytree(trained / "run", tmp_path / "moved")
    return tmp_path / "moved"


def export(place: Path, out: Path, *options: str) -> str:
    result = CliRunner().invoke(commands, ["checkpoint", "export", str(place), str(out), *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_a_run_starts_from_the_folders_weights(trained, tmp_path):
    """In through the training, out through a checkpoint: the same bits."""
    told = export(trained / "run", tmp_path / "out")
    assert told == f"{tmp_path / 'out'}: 20 tensors, 0.1 MB in 1 file\n"
    assert_same_tensors(trained / "initial", tmp_path / "out")
    assert find_model(tmp_path / "out").model == find_model(trained / "initial").model


def test_two_ranks_start_from_the_same_weights(ranks, published, text, tmp_path):
    run = make_run(published("gpt2"), text, tmp_path / "run", "layout.tensor=2")
    ranks.run(2, whole_run, run)
    export(tmp_path / "run", tmp_path / "out", "--max-file-size", "40KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_tensors(published("gpt2"), tmp_path / "out")


def test_an_export_keeps_ends_of_text_and_the_chat_template(trained, moved, tmp_path, monkeypatch):
    """Wherever the run lies by now, and whatever became of the folder that it started from."""
    monkeypatch.setattr(Path, "is_file", lambda self, found=Path.is_file: trained not in self.parents and found(self))
    export(moved, tmp_path / "out", "--json")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert find_model(tmp_path / "out").stops == (11,)


@pytest.mark.parametrize("size", ["5", "GB", "0GB", "5TB", "-1GB"])
def test_a_size_that_is_none_is_named(trained, tmp_path, size):
    with pytest.raises(ConfigError, match=f"`--max-file-size` must be a size such as 500MB or 5GB, but is '{size}'"):
        export(trained / "run", tmp_path / "out", "--max-file-size", size)


def test_a_run_goes_on_from_its_checkpoint_without_the_folder(trained, moved):
    config = moved / "config.toml"
    config.write_text(config.read_text().replace(str(trained / "initial"), str(moved / "gone")))
    run_training(load_run(config, [f"output.folder={moved}", "training.steps=2"]), resume=True)
    ours, theirs = (find_model(place) for place in (moved, trained / "initial"))
    assert ours.folder.name == "step-00000002"
    assert ours.model == theirs.model


def test_a_run_must_find_its_folder_to_start(trained, text, tmp_path):
    run = make_run(trained / "initial", text, tmp_path / "run")
    lost = load_run(_table(run), [f"training.initialize_from={tmp_path}/lost"])
    assert refusal(ConfigError, run_training, lost) == (
        f"`training.initialize_from` must name a Hugging Face folder, but `{tmp_path}/lost` has no `config.json`. "
        "Check the path."
    )


def test_a_run_does_not_start_without_all_weights(trained, text, tmp_path):
    shutil.copytree(trained / "initial", tmp_path / "initial")
    (tmp_path / "initial" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must hold `model\.safetensors`, but does not"):
        run_training(make_run(tmp_path / "initial", text, tmp_path / "run"))
    assert not (tmp_path / "run" / "config.toml").exists()


def test_tokens_of_another_tokenizer_are_refused(trained, published, text, tmp_path):
    from crosscut.data import Tokenizer

    other = tmp_path / "tokenizer.json"
    Tokenizer.train(["pack my box with five dozen liquor jugs"] * 9, vocab_size=270).save(other)
    with pytest.raises(
        ConfigError, match=r"`data\.tokens` must be made with the tokenizer of `training\.initialize_from`"
    ):
        run_training(make_run(published("llama"), text, tmp_path / "run", f"data.tokenizer={other}"))


def _table(run: RunConfig) -> dict:
    import dataclasses

    return dataclasses.asdict(run)


# Places


def test_a_run_a_checkpoint_and_a_folder_of_them_are_found(trained):
    checkpoint = trained / "run" / "checkpoints" / "step-00000001"
    found = [find_model(place) for place in (trained / "run", str(checkpoint), checkpoint.parent)]
    assert found[0] == found[1] == found[2]
    source = found[0]
    assert (source.name, str(source.folder)) == ("run/step-00000001", str(checkpoint))
    assert source.lasting_name == "run"
    assert source.tokenizer == trained / "run" / "initial" / "tokenizer.json", "with its chat template, if it has one"
    assert (source.end_of_text, source.stops, source.begin_of_text) == (0, (11,), None)
    assert not source.is_published


def test_a_published_folder_is_found(trained):
    source = find_model(trained / "initial")
    assert (source.name, source.is_published) == ("initial", True)
    assert source.tokenizer == trained / "initial" / "tokenizer.json"
    assert (source.end_of_text, source.stops, source.begin_of_text) == (0, (11,), None)


def test_a_checkpoint_is_the_model_that_was_trained(ranks, trained):
    """At another layout, too."""
    run, initial = find_model(trained / "run"), find_model(trained / "initial")
    ((ours,),) = ranks.run(1, jobs.logits, run, Layout(), ["bfloat16"])
    ((theirs,),) = ranks.run(1, jobs.logits, initial, Layout(), ["bfloat16"])
    assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        ranks.run(4, jobs.logits, run, Layout(tensor=4), ["float64"]),
        ranks.run(4, jobs.logits, initial, Layout(tensor=4), ["float64"]),
        strict=True,
    ):
        assert torch.equal(ours[0], theirs[0])


def test_a_moved_run_has_its_tokenizer_with_it(trained, moved, published):
    shutil.copy(published("gpt2") / "tokenizer.json", moved / "tokens" / "tokenizer.json")
    text = (moved / "tokens" / "tokenizer.json").read_text()
    (moved / "tokens" / "tokenizer.json").write_text(text + " ")  # no longer the same file as the initial one
    source = find_model(moved)
    assert source.tokenizer == moved / "tokens" / "tokenizer.json"
    assert source.name == "moved/step-00000001"
    assert source.stops == ()


def test_a_run_without_its_tokens_is_told(trained, moved, monkeypatch):
    config = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(config)
    (moved / "tokens" / "tokenizer.json").unlink()
    (trained / "run" / "tokens").rename(trained / "run" / "hidden")
    try:
        with pytest.raises(CheckpointError, match=rf"`{moved}/tokens/tokenizer.json` must exist, but is missing"):
            find_model(moved)
    finally:
        (trained / "run" / "hidden").rename(trained / "run" / "tokens")


def test_the_newest_good_checkpoint_is_taken(trained, moved, capfd):
    shutil.copytree(moved / "checkpoints" / "step-00000001", moved / "checkpoints" / "step-00000002")
    (moved / "checkpoints" / "step-00000002" / "rank-0.safetensors").unlink()
    assert find_model(moved).folder.name == "step-00000001"
    assert "A damaged checkpoint is skipped" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match="must exist, but is missing"):
        find_model(moved / "checkpoints" / "step-00000002")


def test_a_place_that_is_nothing_is_told(tmp_path):
    assert refusal(ConfigError, find_model, tmp_path) == (
        f"`{tmp_path}` must be a run's folder, a checkpoint or a Hugging Face folder, but has no `config.toml`, "
        "`manifest.json` or `config.json`. Name another folder, or train a model first: `crosscut train` trains the "
        "demo into `runs/demo`."
    )


def test_a_folder_without_a_tokenizer_is_told(trained, tmp_path):
    shutil.copytree(trained / "initial", tmp_path / "initial")
    (tmp_path / "initial" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json` must exist, but is missing. The folder must hold"):
        find_model(tmp_path / "initial")


# Ends of text that no name tells

END = "<\uff5cend\u2581of\u2581text\uff5c>"


@pytest.fixture(scope="module")
def foreign(published, text, tmp_path_factory) -> Path:
    """The tied Llama with a tokenizer whose end of text has another name, and a run that started from it."""
    root = tmp_path_factory.mktemp("foreign")
    shutil.copytree(published("llama tied"), root / "initial")
    tokenizer = root / "initial" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace("<|endoftext|>", END), encoding="utf-8")
    edit(root / "initial", eos_token_id=11)
    (root / "initial" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    run_training(make_run(root / "initial", text, root / "run", "output.sample_tokens=2"))
    return root


def test_an_end_of_text_is_what_the_folder_names(foreign):
    source = find_model(foreign / "initial")
    assert (source.end_of_text, source.stops) == (0, (11,))
    assert source.load_tokenizer().end_of_text == 0


def test_a_run_ends_texts_as_the_folder_that_it_started_from(foreign, tmp_path):
    """Wherever it lies; also where only the tokenizer is left of its tokens."""
    shutil.copytree(foreign / "run", tmp_path / "moved")
    for kept in (foreign / "run", tmp_path / "moved"):
        source = find_model(kept)
        assert (source.end_of_text, source.stops, source.load_tokenizer().end_of_text) == (0, (11,), 0)
        (tmp_path / "moved" / "tokens" / "manifest.json").unlink(missing_ok=True)
    source = find_model(tmp_path / "moved")
    assert (source.end_of_text, source.stops) == (0, (11,))


def test_a_run_ends_texts_as_its_tokens_do(foreign, text, tmp_path):
    """They are what it was trained on; the ends of the model that it started from are stops."""
    bare = shutil.copy(foreign / "initial" / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    run_training(make_run(foreign / "initial", text, tmp_path / "run", f"data.tokenizer={bare}"))
    source = find_model(tmp_path / "run")
    assert (source.end_of_text, source.stops, source.load_tokenizer().end_of_text) == (5, (0, 11), 5)
    export(tmp_path / "run", tmp_path / "out")
    assert (find_model(tmp_path / "out").end_of_text, find_model(tmp_path / "out").stops) == (5, (0, 11))
    (tmp_path / "run" / "initial" / "chat_template.jinja").write_text("{{ eos_token }}")  # it keeps its meaning
    export(tmp_path / "run", tmp_path / "with-template")
    assert (find_model(tmp_path / "with-template").end_of_text, find_model(tmp_path / "with-template").stops) == (
        0,
        (5, 11),
    )


def test_such_a_model_is_scored_and_asked(foreign, tmp_path):
    config = EvaluationConfig(text=(str(tmp_path / "text.txt"),), overlap=8, window=16)
    (tmp_path / "text.txt").write_text("the quick brown fox")
    found = []
    for place in (foreign / "initial", foreign / "run"):
        report = evaluate_place(str(place), config, Machinery(layout=Layout(), device="cpu"))
        found.append(report["tasks"]["text"]["figures"])
        asked = CliRunner().invoke(commands, ["generate", str(place), "--prompt", "the quick", "--tokens", "2"])
        assert asked.exit_code == 0, asked.output
    assert found[0] == found[1]


def test_an_export_names_the_end_of_text(foreign, text, tmp_path):
    """From a run that started from a folder, and from one that only took the folder's tokenizer."""
    from transformers import AutoTokenizer

    table = _table(make_run(foreign / "initial", text, tmp_path / "run"))
    del table["training"]["initialize_from"]
    run_training(load_run(table))
    for run in (foreign / "run", tmp_path / "run"):
        out = tmp_path / f"exported-{run.parent.name}"
        export(run, out)
        assert AutoTokenizer.from_pretrained(out).eos_token == END
        assert find_model(out).end_of_text == 0


def test_an_export_of_an_own_gpt2_has_ids_of_its_vocabulary(text, tmp_path, caplog):
    """`transformers` would otherwise take the ids of the published GPT-2, 50256, and warn about them."""
    import transformers

    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_sequence_length": 32}
    training = {"steps": 1, "batch_size": 2, "sequence_length": 16, "validation_sequences": 2}
    table = {"model": sizes, "training": training, "data": {"text": [str(text)], "vocab_size": 300}}
    run_training(load_run(table, ["optimizer.warmup_steps=0", f"output.folder={tmp_path / 'run'}"]))
    export(tmp_path / "run", tmp_path / "out")
    transformers.logging.enable_propagation()
    try:
        config = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    finally:
        transformers.logging.disable_propagation()
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert "token_id" not in caplog.text


def test_an_export_keeps_the_begin_of_text_of_the_model_that_its_run_started_from(moved, tmp_path):
    for given, told in ((7, 7), (50_256, 0), (None, 0)):  # the second one is of another vocabulary
        edit(moved / "initial", bos_token_id=given)
        export(moved, tmp_path / f"out-{given}")
        assert json.loads((tmp_path / f"out-{given}" / "config.json").read_text())["bos_token_id"] == told
    edit(moved / "initial", bos_token_id="7")
    with pytest.raises(ConfigError, match=r"`bos_token_id` in `.*` must be an id from 0 to 2147483647, but is '7'"):
        export(moved, tmp_path / "bad")


@pytest.fixture
def with_begin(trained, tmp_path) -> Path:
    """The initial folder with a tokenizer that puts `<s>` before a text."""
    import tokenizers

    shutil.copytree(trained / "initial", tmp_path / "initial")
    path = tmp_path / "initial" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    tokenizer.save(str(path))
    return tmp_path / "initial"


def test_what_a_template_puts_first_begins_a_text(with_begin):
    import tokenizers

    begin = tokenizers.Tokenizer.from_file(str(with_begin / "tokenizer.json")).token_to_id("<s>")
    assert find_model(with_begin).begin_of_text == begin


def test_a_text_begins_for_a_run_as_for_the_model_that_it_starts_from(with_begin, text, tmp_path):
    """In what is found, and in the scores and the sample while training."""
    table = _table(make_run(with_begin, text, tmp_path / "run"))
    lambada = tmp_path / "lambada.jsonl"
    lambada.write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n')
    run_training(load_run(table, [f"evaluation.lambada={lambada}", "evaluation.overlap=8", "output.sample_tokens=2"]))
    assert find_model(tmp_path / "run").begin_of_text == find_model(with_begin).begin_of_text
    rows = read_metrics(tmp_path / "run")
    perplexity = next(row["lambada_perplexity"] for row in rows if "lambada_perplexity" in row)
    on = Machinery(layout=Layout(), device="cpu")
    config = EvaluationConfig(lambada=str(lambada), overlap=8, window=16)
    of_folder = evaluate_place(str(with_begin), config, on)["tasks"]["lambada"]["figures"]["perplexity"]
    assert perplexity == pytest.approx(of_folder, rel=1e-5)


@pytest.mark.parametrize("name", ["run", "initial"])
def test_a_source_is_the_same_after_its_way_to_another_rank(trained, name):
    """A checkpoint, and a published model."""
    source = find_model(trained / name)
    assert ModelSource.from_json(json.loads(json.dumps(source.to_json()))) == source
