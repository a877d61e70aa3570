"""Text from a run of a few steps."""

import json
import os
import pty
import subprocess
import sys

import pytest

from crosscut.cli import main as run_main


@pytest.fixture
def generate(trained, monkeypatch, capsys):
    """Runs the command in this process; gives what it printed."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["crosscut", "generate", str(trained), *arguments])
        run_main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def fail(generate, capsys, no_launch):
    """Runs the command, which must fail before a rank starts; gives its message."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            generate(*arguments)
        assert stopped.value.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1].removeprefix("crosscut: ")

    return run


def records(printed: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in printed.splitlines()]


def test_one_text_is_the_prompt_and_what_follows(generate):
    printed = generate("--prompt", "It was", "--tokens", "8")
    (record,) = records(generate("--prompt", "It was", "--tokens", "8", "--json"))
    assert printed == f"It was{record['text']}\n"
    assert len(record["tokens"]) == 8
    assert record["finish"] == "length"


def test_a_special_token_in_a_prompt_is_read(generate):
    options = ("--temperature", "0", "--tokens", "8", "--json")
    (without,), (spelled,) = (records(generate("--prompt", start, *options)) for start in ("", "<|endoftext|>"))
    assert spelled["tokens"] == without["tokens"], "both start at an end of text"


def test_without_a_prompt_a_text_begins(generate):
    (record,) = records(generate("--temperature", "0", "--json"))
    assert record["prompt"] == ""
    assert len(record["tokens"]) == 64, "200 do not fit: 64 are read, the end of text before them too"


def test_samples_of_a_file_of_prompts_come_in_order_and_are_those_of_each_alone(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("It was\n\nFellow citizens of the Senate\n")
    options = ("--samples", "2", "--tokens", "9", "--top-p", "0.9", "--temperature", "1.5", "--seed", "4")
    found = records(generate("--prompts", str(file), *options, "--json"))
    assert [(record["prompt"], record["sample"]) for record in found] == [
        (prompt, sample) for prompt in ("It was", "Fellow citizens of the Senate") for sample in (0, 1)
    ]
    assert len({tuple(record["tokens"]) for record in found}) == 4
    assert records(generate("--prompt", "Fellow citizens of the Senate", *options, "--json")) == found[2:]
    printed = generate("--prompts", str(file), *options)
    assert printed.startswith(f"--- 1 of 4, sample 1\nIt was{found[0]['text']}\n--- 2 of 4, sample 2\n")


@pytest.mark.parametrize(("samples", "is_packed"), [("1", False), ("3", True)])
def test_weights_are_packed_where_some_texts_are_written_at_once(generate, monkeypatch, samples, is_packed):
    from crosscut.generation import order
    from crosscut.kernels.onednn import IS_THERE

    made = []
    make = order.Decoder
    monkeypatch.setattr(order, "Decoder", lambda *args, **options: made.append(args[0]) or make(*args, **options))
    generate("--prompt", "It was", "--tokens", "2", "--samples", samples)
    assert made[0].blocks[0].mlp.expand.weight._local_tensor.is_mkldnn == (is_packed and IS_THERE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_a_model_writes_in_every_precision_of_weights(generate, precision):
    (record,) = records(generate("--prompt", "It was", "--tokens", "2", "--precision", precision, "--json"))
    assert len(record["tokens"]) == 2


def test_prompts_may_be_records(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "two\nlines", "number": 1}) + "\n")
    (record,) = records(generate("--prompts", str(file), "--tokens", "1", "--json"))
    assert record["prompt"] == "two\nlines"


def test_stop_strings_end_a_text(generate):
    (whole,) = records(generate("--prompt", "It", "--tokens", "30", "--json"))
    stop = whole["text"][5:8]
    (record,) = records(generate("--prompt", "It", "--tokens", "30", "--stop", "@@", "--stop", stop, "--json"))
    assert record["text"] == whole["text"][: whole["text"].index(stop)]
    assert record["finish"] == "stop"


@pytest.mark.parametrize("which", ["--presence-penalty", "--frequency-penalty"])
def test_what_has_been_written_is_favoured_or_not(generate, which):
    options = ("--prompt", "It was", "--tokens", "8", "--temperature", "0", "--json", which)
    (favoured,), (disfavoured,) = (records(generate(*options, penalty)) for penalty in ("-2", "2"))
    assert len(set(favoured["tokens"])) == 1
    assert len(set(disfavoured["tokens"])) == 8


@pytest.mark.slow  # tests/generation/test_decoder.py slides windows quickly
def test_a_sliding_window_lets_a_text_go_on(generate):
    (record,) = records(generate("--prompt", "It was", "--tokens", "100", "--slide", "--json"))
    assert len(record["tokens"]) == 100


def test_an_older_checkpoint_writes_another_text(generate, trained, monkeypatch, capsys):
    options = ("--prompt", "It was", "--temperature", "3", "--top-k", "0", "--tokens", "50")
    newest = generate(*options)
    older = trained / "checkpoints" / "step-00000002"
    monkeypatch.setattr("sys.argv", ["crosscut", "generate", str(older), *options])
    run_main()
    assert capsys.readouterr().out not in ("", newest)


def test_what_cannot_be_is_told_before_a_rank_starts(fail, tmp_path):
    assert fail("--tensor", "3") == "`--tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4."
    assert fail("--prompt", "é" * 40).startswith(
        f"The prompt '{'é' * 40}' must fit into the model's window of 64 tokens, but has 80. Shorten the prompt, or "
        f"pass --slide."
    )
    assert fail("--prompt", "é", "--tokens", "64") == (
        "`--tokens` must be at most 63 after the prompt 'é', but is 64. The model's window has 64 "
        "tokens, and the prompt takes 2 of them. Ask for fewer tokens, or pass --slide."
    )
    assert fail("--tokens", "0") == "`--tokens` must be at least 1, but is 0."
    assert fail("--samples", "0") == "`--samples` must be at least 1, but is 0."
    assert fail("--top-p", "2") == "`--top-p` must be above 0 and at most 1, but is 2.0."
    assert fail("--presence-penalty", "3") == "`--presence-penalty` must be from -2 to 2, but is 3.0."
    assert fail("--frequency-penalty", "-3") == "`--frequency-penalty` must be from -2 to 2, but is -3.0."
    assert fail("--top-k", "-1") == "`--top-k` must be at least 0, but is -1."
    assert "Give either --prompt or --prompts, not both." in fail("--prompt", "a", "--prompts", "b")


def test_a_file_without_prompts_is_told(fail, tmp_path):
    file = tmp_path / "prompts.jsonl"
    assert fail("--prompts", str(file)) == (
        f"`{file}` must be a readable file of prompts, but is not: No such file or directory. Use a UTF-8 file with "
        "one prompt per line."
    )
    file.write_text("\n")
    assert fail("--prompts", str(file)) == f"`{file}` must hold one prompt per line, but is empty. Add a prompt."
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert fail("--prompts", str(file)) == (
        f'`{file}:2` must be a JSON object with a string `prompt`, but is {{"text": "b"}}.'
    )
    file.write_text("[" * 100_000)
    assert fail("--prompts", str(file)) == (
        f"`{file}:1` must be a JSON object with a `prompt`, but is not valid JSON: it is nested too deeply."
    )
    file.write_text('{"prompt": "a \\ud800"}\n')
    assert fail("--prompts", str(file)) == (
        f"`{file}:1` must be a JSON object with a `prompt`, but is not valid JSON: it holds a lone surrogate, which is "
        "not a character."
    )
    file.write_text("a\n")
    assert fail("--prompts", str(file)).startswith(
        f"`{file}:1` must be a JSON object with a `prompt`, but is not valid JSON:"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="takes the terminal as Linux does")
@pytest.mark.slow
def test_at_a_terminal_it_asks_for_prompts(trained):
    ours, theirs = pty.openpty()
    take = "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "crosscut", "generate", str(trained), "--tensor", "2", "--tokens", "5"]
    with subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, os, sys, termios; {take}", *command], stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True,
    ) as running:  # fmt: skip
        os.close(theirs)
        shown = read_until(ours, "prompt> ")
        os.write(ours, b"It was\n")
        shown += read_until(ours, "prompt> ")
        os.write(ours, "é".encode() * 40 + b"\n")
        shown += read_until(ours, "prompt> ")
        os.write(ours, b"\x04")
        assert running.wait(60) == 0, shown
    os.close(ours)
    assert "It was" in shown.replace("prompt> It was", "", 1)
    assert "must fit into the model's window of 64 tokens" in shown.replace("\r\n", " ")


def read_until(terminal: int, end: str) -> str:
    shown = b""
    while not shown.endswith(end.encode()):
        try:
            shown += os.read(terminal, 1024)
        except OSError:  # the command has ended
            raise AssertionError(shown.decode()) from None
    return shown.decode()


def test_logits_that_are_not_finite_end_the_command(tmp_path, monkeypatch, capsys):
    from safetensors.torch import load_file, save_file

    from tests.serving.conftest import write_tokenizer, write_weights

    write_weights(tmp_path, write_tokenizer(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite, but not after a product
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("sys.argv", ["crosscut", "generate", str(tmp_path), "--prompt", "We", "--device", "cpu"])
    with pytest.raises(SystemExit) as stopped:
        run_main()
    assert stopped.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(
        "crosscut: The model's logits must be finite, but are not: some are NaN at token 1 after the"
    )
