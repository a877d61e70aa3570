"""The token that ends all answers stops the run, its checkpoints, its exports and its adapters, as in transformers."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from crosscut.cli.main import commands
from crosscut.config import DataError
from crosscut.data import Tokenizer
from crosscut.pretrained import export_adapter, export_checkpoint, find_model
from crosscut.pretrained.companions import keep_stop
from tests.finetuning.chat import templates
from tests.finetuning.chat.conftest import write_chats
from tests.finetuning.downstream.conftest import finetune
from tests.nursery import forked
from tests.pretrained.models import edit
from tests.refusals import refusal
from tests.serving.conftest import fork

ASKED = "<|im_start|>user\nthe fox?<|im_end|>\n<|im_start|>assistant\n"
CHAT = {"messages": [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "jumps over the dog"}]}
SETTINGS = (
    "training.batch_size=2", "training.sequence_length=64", "training.precision=float32", "training.steps=40",
    "training.device=cpu", "training.validate_every=0", "optimizer.learning_rate=0.02",
)  # fmt: skip


@pytest.fixture(scope="module")
def speaker(model, tmp_path_factory) -> Path:
    """A base model whose only stop is `<|endoftext|>`, with ChatML as its template."""
    folder = tmp_path_factory.mktemp("speaker") / "model"
    shutil.copytree(model, folder)
    templates.write_speaker(folder, model / "tokenizer.json", templates.CHATML)
    write_chats(folder.parent / "chats.jsonl", [CHAT] * 8)
    return folder


@pytest.fixture(scope="module")
def end(speaker) -> int:
    return Tokenizer.load(speaker / "tokenizer.json").encode_prompt("<|im_end|>")[0]


def tune(speaker: Path, out: Path, *more: object) -> Path:
    finetune("chat", speaker.parent / "chats.jsonl", "--model", speaker, "--output", out, *SETTINGS, *more)
    return out


@pytest.fixture(scope="module")
def tuned(speaker, tmp_path_factory) -> Path:
    """A run that has learned the answer by heart."""
    forked()
    return tune(speaker, tmp_path_factory.mktemp("tuned") / "run")


def written(place: Path, *options: str) -> dict[str, object]:
    """What `crosscut generate` writes after the question."""
    asked = ("generate", str(place), "--prompt", ASKED, "--tokens", "20", "--temperature", "0", "--json")
    result = CliRunner().invoke(commands, [*asked, "--device", "cpu", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def their_ids(place: Path) -> list[int]:
    """Ids that `transformers` generates after the question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModelForCausalLM.from_pretrained(place)
    ids = tokenizer.apply_chat_template(
        CHAT["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**ids, max_new_tokens=20, do_sample=False)
    return found[0, ids["input_ids"].shape[1] :].tolist()


def test_a_run_its_checkpoints_and_its_export_stop_where_the_answers_end(tuned, end, tmp_path):
    shutil.copytree(tuned, tmp_path / "moved")
    checkpoint = next((tmp_path / "moved" / "checkpoints").glob("step-*"))
    export_checkpoint(find_model(tuned), tmp_path / "out")
    for place in (tuned, tmp_path / "moved", checkpoint, tmp_path / "out"):
        source = find_model(place)
        assert (source.end_of_text, source.stops) == (0, (end,))
    ours, theirs = written(tuned), their_ids(tmp_path / "out")
    assert (ours["text"], ours["finish"]) == ("jumps over the dog", "stop")
    assert theirs == Tokenizer.load(tuned / "tokens" / "tokenizer.json").encode_prompt("jumps over the dog<|im_end|>")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


@pytest.mark.slow  # the test above compares the stops; here the server reads them
def test_the_server_stops_where_the_answers_end(tuned, end):
    server = fork(tuned)
    try:
        common = {"model": find_model(tuned).name, "max_tokens": 20, "temperature": 0}
        body = {**common, "messages": CHAT["messages"][:1], "logprobs": True}
        status, answer = server.ask("/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "stop", "jumps over the dog")
        assert "".join(one["token"] for one in choice["logprobs"]["content"]) == "jumps over the dog"
        status, answer = server.ask("/v1/completions", {**common, "prompt": ASKED})
        assert answer["choices"][0]["finish_reason"] == "stop"
    finally:
        server.stop()


@pytest.mark.slow  # whole runs; the quick test compares the stops of a run that has all weights
def test_a_resumed_run_and_a_run_from_the_export_keep_the_stop(tuned, speaker, end, tmp_path, forked_ranks):
    shutil.copytree(tuned, tmp_path / "run")
    finetune("chat", "--resume", "--output", tmp_path / "run", "training.steps=42")
    export_checkpoint(find_model(tmp_path / "run"), tmp_path / "out")
    shutil.copy(speaker.parent / "chats.jsonl", tmp_path)
    again = tune(tmp_path / "out", tmp_path / "again", "training.steps=1")
    for place in (tmp_path / "run", tmp_path / "out", again):
        assert find_model(place).stops == (end,)
    assert (again / "initial" / "generation_config.json").read_bytes() == (
        tmp_path / "out" / "generation_config.json"
    ).read_bytes()


@pytest.mark.slow  # a whole run; `test_an_adapter_names_ids_that_end_a_text` reads the files without one
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_stop_where_the_answers_end(speaker, end, tmp_path, forked_ranks):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = tune(speaker, tmp_path / "run", "--lora-rank", "16", "optimizer.learning_rate=0.05", "training.steps=120")
    export_adapter(find_model(run), tmp_path / "adapter", base=str(speaker))
    assert find_model(speaker).stops == ()
    for adapter in (run / "adapter", tmp_path / "adapter"):
        assert find_model(speaker, adapter=adapter).stops == (end,)
        assert written(speaker, "--adapter", str(adapter)) == written(run)
    assert written(run)["finish"] == "stop"
    export_checkpoint(find_model(speaker, adapter=run / "adapter"), tmp_path / "merged")
    export_checkpoint(find_model(run), tmp_path / "out")
    assert find_model(tmp_path / "merged").stops == find_model(tmp_path / "out").stops == (end,)
    assert their_ids(tmp_path / "merged") == their_ids(tmp_path / "out")
    assert their_ids(tmp_path / "out")[-1] == end
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(speaker), tmp_path / "adapter")


def test_an_export_names_all_stops_in_the_file_that_transformers_reads(tuned, speaker, end, tmp_path):
    """Also where `config.json` named a stop that `generation_config.json` did not."""
    from transformers import GenerationConfig

    shutil.copytree(tuned, tmp_path / "run")
    edit(tmp_path / "run" / "initial", eos_token_id=[0, 11])
    export_checkpoint(find_model(tmp_path / "run"), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [0, 11, end]
    (tmp_path / "run" / "initial" / "generation_config.json").unlink()
    export_checkpoint(find_model(tmp_path / "run"), tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()
    assert find_model(tmp_path / "without").stops == (11,)
    keep_stop(tmp_path / "run" / "initial", end)
    export_checkpoint(find_model(tmp_path / "run"), tmp_path / "kept")
    assert GenerationConfig.from_pretrained(tmp_path / "kept").eos_token_id == [0, 11, end]


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, ()),
        ({"generation_config.json": {"eos_token_id": [0, 11]}}, (11,)),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, (292,)),  # as TRL writes it
        ({"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}}}, (292,)),
        ({"config.json": {"eos_token_id": 12}}, ()),
    ],
)
def test_an_adapter_names_ids_that_end_a_text(speaker, tmp_path, files, stops):
    write_adapter(speaker, tmp_path)
    for name, table in files.items():
        (tmp_path / name).write_text(json.dumps(table))
    assert find_model(speaker, adapter=tmp_path).stops == stops


def test_an_adapter_whose_end_the_model_does_not_have_is_refused(speaker, tmp_path):
    write_adapter(speaker, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|bye|>"}')
    told = refusal(DataError, lambda: find_model(speaker, adapter=tmp_path))
    assert told.startswith(f"`eos_token` in `{tmp_path / 'tokenizer_config.json'}` must be a token of")


def write_adapter(speaker: Path, folder: Path) -> None:
    """Write an adapter in PEFT's format."""
    weight = load_file(speaker / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{name}.lora_A.weight": weight[:2].clone(), f"{name}.lora_B.weight": weight[:, :2].clone()}
    save_file(pair, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
