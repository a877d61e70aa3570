"""A user's mistake is one message on one line, exit status 2, and no process started."""

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest
from click.testing import CliRunner

from crosscut.cli import main as run_main
from crosscut.cli.main import _end, commands
from crosscut.config import ConfigError
from tests.cli.conftest import TINY, handlers_restored


@pytest.fixture
def fail(forked_ranks, no_launch, monkeypatch, capsys, tmp_path):
    """Runs a command that must fail, in this process and with `launch` out of reach; gives its message.

    The server of the ranks runs already. A command would start it in the test's folder, which may be gone before the
    server has started.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int = 2) -> str:
        monkeypatch.setattr("sys.argv", ["crosscut", *arguments])
        with pytest.raises(SystemExit) as stopped, handlers_restored():
            run_main()
        assert stopped.value.code == status
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert message.startswith("crosscut: ")
        return message.removeprefix("crosscut: ")

    return run


TOLD = {
    "train nowhere.toml": "`nowhere.toml` must be a TOML file, but does not exist.",
    "train training.step=3": "The nearest is `training.steps`.",
    "train steps 5": "To set `training.steps`, type training.steps=VALUE.",
    "train {tiny} data.text=no-such-book.txt": "no-such-book.txt",
    "train {tiny} data.text={book} model.vocab_size=100": "`model.vocab_size` must be at least the size of the "
    "tokenizer's vocabulary (300), but is 100.",
    "train {tiny} data.text={book} output.folder=run --resume": "`run/checkpoints` must hold a checkpoint, but holds "
    "none.",
    "metrics s3://bucket/run": "`RUN` must be a path on this machine, but is 's3://bucket/run'.",
    "metrics run --csv s3://bucket/a.csv": "`--csv` must be a path on this machine, but is 's3://bucket/a.csv'.",
    "finetune chat a.jsonl --model m --output s3://bucket/run": "`--output` must be a path on this machine, but is",
    "generate nowhere": "`nowhere` must be a run's folder, a checkpoint or a Hugging Face",
}


@pytest.mark.parametrize("command", TOLD)
def test_mistake_is_told(fail, book, command):
    assert TOLD[command] in fail(*command.format(tiny=" ".join(TINY), book=book).split())


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--steps", "5"], "training.steps=5"),
        (["--steps=5", "layout.tensor=1"], "training.steps=5"),
        (["--batch-size", "8", "run.toml"], "training.batch_size=8"),
        (["run.toml", "-lr", "3e-4"], "optimizer.learning_rate=3e-4"),
        (["--training.seed", "7", "--profile"], "training.seed=7"),
        (["--bf16", "run.toml"], "training.precision=VALUE"),
        (["--vocab-size", "300"], "model.vocab_size=300 or data.vocab_size=300"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_setting_written_as_an_option_is_told_how_to_write_it(fail, tmp_path, command, words, setting):
    (tmp_path / "run.toml").write_text('[model]\npreset = "laptop-tiny"\n[training]\nsequence_length = 64\n')
    if command == "verify":
        words = [word for word in words if word != "--profile"]
    message = fail(command, *words)
    assert message.endswith(f" must be an option of this command, but there is no such option. Settings are written "
                            f"without dashes: {setting}.")  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--resum"], "Did you mean '--resume'?"),
        (["train", "--zzz", "5"], "No such option '--zzz'."),
        (["plan", "--pric", "5"], "Did you mean '--price'?"),
    ],
)
def test_option_that_resembles_no_setting_is_clicks_to_tell(arguments, told):
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_error_after_the_loading_names_the_line_too(fail, tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "laptop-tiny"\n\n[data]\ntext = "gone.txt"\n[training]\nsequence_length = 64\n'
    )
    told = "`data.text` must name existing files, but nothing matches `gone.txt`. Check the path."
    assert fail("train", "run.toml") == f"run.toml:5: {told}"
    assert fail("train", "run.toml", "data.text=gone.txt") == told


def test_profile_needs_steps(fail, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("\n\n".join(f"Fellow citizens, address {i} of many, each long enough." * 9 for i in range(60)))
    message = fail("train", *TINY, f"data.text={text}", "--profile", "layout.tensor=1", "output.folder=run")
    assert message == (
        "`training.steps` must leave at least 10 steps for --profile, but leaves 4. Train for more steps, or "
        "remove --profile."
    )


def test_undecodable_text_names_file_and_offset(fail, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good words\n" * 10 + b"\xff\xfe")
    message = fail("train", *TINY, "data.text=bad.txt", "output.folder=run")
    assert "bad.txt" in message
    assert "110" in message
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_text_shorter_than_a_sequence_is_told(fail, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    message = fail("train", *TINY, "data.text=short.jsonl", "output.folder=run")
    assert "`training.sequence_length` + 1 = 33 tokens" in message


def test_run_folder_with_checkpoints_is_not_overwritten(fail, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    assert "holds checkpoints of a run. Pass --resume" in fail("train", *TINY, "output.folder=run")


@pytest.mark.parametrize(
    "command",
    [
        ("train", "layout.data=100000", "training.batch_size=100000"),
        ("train", "layout.tensor=64", "layout.data=512", "training.batch_size=512", "model.num_heads=64",
         "model.hidden_size=4096"),
        ("verify", "--layout", "data=100000", "training.batch_size=100000"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_more_ranks_than_the_machine_can_hold_are_refused_at_once(fail, command):
    message = fail(*command)
    assert message.startswith("`layout.tensor` x `layout.data` must be at most ")
    assert message.endswith("Choose a smaller layout, or use several machines with torchrun.")


@pytest.mark.parametrize(
    ("layout", "needs"),
    {
        "tensor=32": "32 ranks need 102 GB",
        "tensor=8 pipeline=4": "32 ranks need 102 GB",
        "data=2": "2 ranks need 200 GB",
        "data=8 sharding=zero2": "8 ranks need 100 GB",
        "data=1": "1 rank needs 100 GB",
    }.items(),
)
def test_a_model_that_is_too_large_for_the_machine_is_refused_at_once(fail, layout, needs, monkeypatch):
    monkeypatch.setattr("crosscut.training.requirements.available_memory", lambda: 16_000_000_000)
    settings = [f"layout.{setting}" for setting in layout.split()]
    message = fail("train", "8.3B", "data.text=book.txt", "training.device=cpu", *settings)
    assert message.startswith(
        f"The weights and moments of the model must fit into this machine's memory (16 GB), but {needs}. Choose a "
        "smaller model or fewer data ranks, "
    )
    settings = ("training.precision=float32", "layout.tensor=4", "data.text=book.txt")
    assert "`data.text` must name existing files" in fail("train", "gpt2-small", "training.device=cpu", *settings)


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "training.batch_size=2": "`training.batch_size` must be 4 as in the checkpoint",
        "training.seed=5": "`training.seed` must be 1234 as in the checkpoint",
        "training.sequence_length=16": "`training.sequence_length` must be 32 as in the checkpoint",
        "model.num_layers=1": "`model.num_layers` must be 2 as in the checkpoint",
        "model.num_heads=8": "`model.num_heads` must be 4 as in the checkpoint",
        "training.steps=4": "`training.steps` must be above the step of the checkpoint (4), but is 4. Try "
        "training.steps=8.",
    }.items(),
)
def test_resuming_another_run_is_told(fail, trained, override, message):
    config = trained / "config.toml"
    before = config.read_bytes()
    assert fail("train", str(config), "--resume", "training.steps=9", override).startswith(message)
    assert config.read_bytes() == before, "a resume that fails must leave the run's config"


def test_resuming_needs_the_tokens_but_not_the_text(trained, tmp_path, capsys):
    from crosscut.config import load_run
    from crosscut.training import run_training

    shutil.copytree(trained, tmp_path / "run")
    options = [f"output.folder={tmp_path / 'run'}", "training.steps=6", "data.text=gone.txt"]
    run_training(load_run(trained / "config.toml", options), resume=True)
    assert "after 6 steps" in capsys.readouterr().out


def test_changed_shard_is_told(fail, book, tmp_path):
    from crosscut.config import DataConfig
    from crosscut.data import prepare

    prepare(DataConfig(text=(str(book),), vocab_size=300), tmp_path / "tokens", seed=1, progress=False)
    shard = tmp_path / "tokens" / "train-0.tokens"
    damaged = bytearray(shard.read_bytes())
    damaged[10] ^= 1
    shard.write_bytes(bytes(damaged))
    message = fail("train", *TINY, "data.text=[]", "data.tokens=tokens", "output.folder=run", status=65)
    assert "train-0.tokens` must have the SHA-256" in message


def test_unknown_command_is_clicks_to_tell():
    result = CliRunner().invoke(commands, ["trian"])
    assert result.exit_code == 2
    assert "No such command 'trian'" in result.output


@pytest.mark.parametrize("is_told", [False, True])
def test_a_mistake_that_another_rank_tells_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_told: bool
) -> None:
    error = ConfigError("`training.steps` must be at least 1, but is 0.")
    error.is_told = is_told
    monkeypatch.setattr(commands, "main", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit) as stopped, handlers_restored():
        run_main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ("" if is_told else f"crosscut: {error}\n")


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, *, status: int = 2
) -> str:
    """Message of a training that ends with an error."""
    monkeypatch.setattr(sys, "argv", ["crosscut", "train"])
    monkeypatch.setattr(commands, "main", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit) as stopped, handlers_restored():
        run_main()
    told = capsys.readouterr().err
    assert stopped.value.code == status, told
    assert "Traceback" not in told
    return told


def hidden(error: OSError) -> ConfigError:
    """An error of the system behind a message, as when writing a checkpoint fails."""
    try:
        try:
            raise error
        except OSError:
            raise ConfigError("`run` must be writable, but is not: Too many files. Free some space.") from None
    except ConfigError as told:
        return told


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "run/x"),
        hidden(OSError(errno.EMFILE, "Too many open files", "run/x")),
        hidden(OSError(errno.ENFILE, "Too many open files in system", "run/x")),
        RuntimeError("pthread_create failed: Too many open files"),
    ],
    ids=["plain", "hidden", "of the system", "of a library"],
)
def test_limit_on_open_files_is_told_with_its_remedy(monkeypatch, capsys, error):
    """Free space, another folder and a fresh copy were once recommended, depending on the place."""
    named = "" if isinstance(error, RuntimeError) else ", but could not open `run/x`"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert ended(monkeypatch, capsys, error) == (
        f"crosscut: A process must be able to open more files than `ulimit -n` allows ({limit}){named}. Raise the "
        "limit: ulimit -n 4096. To continue the run from its last checkpoint, if it has one, use --resume auto.\n"
    )


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("train", " To continue the run from its last checkpoint, if it has one, use --resume auto."),
        ("finetune", " To continue the run from its last checkpoint, if it has one, use --resume."),
        ("prepare", " To continue preparing, start the same command again."),
        ("verify", ""),
    ],
)
def test_ctrl_c_says_how_to_continue_a_command_that_can(monkeypatch, capsys, command, told):
    monkeypatch.setattr(sys, "argv", ["crosscut", command])
    monkeypatch.setattr(commands, "main", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as stopped, handlers_restored():
        run_main()
    assert (stopped.value.code, capsys.readouterr().err) == (130, f"crosscut: Interrupted.{told}\n")


def test_ctrl_c_in_the_body_of_a_class_is_no_failure(monkeypatch, capsys):
    class Interrupted:
        def __set_name__(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises((RuntimeError, KeyboardInterrupt)) as error:  # the latter since Python 3.12
        type("Class", (), {"field": Interrupted()})
    assert ended(monkeypatch, capsys, error.value, status=130).startswith("crosscut: Interrupted.")


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=repr)
def test_too_little_memory_is_told(monkeypatch, capsys, error):
    assert ended(monkeypatch, capsys, error).startswith(
        "crosscut: There must be enough memory for this command, but there is not. Free some memory, or raise the "
        "limits on memory (`ulimit -v`, or that of the container). To continue the run"
    )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_full_disk_is_told_where_the_system_names_no_file(monkeypatch, capsys, code):
    """As if the output goes to a file on the disk."""
    assert ended(monkeypatch, capsys, OSError(code, os.strerror(code))).startswith(
        f"crosscut: Everything must be written, but writing failed: {os.strerror(code)}. Free some space. To continue"
    )
    named = ended(monkeypatch, capsys, OSError(code, os.strerror(code), "out"))
    assert named.startswith("crosscut: `out` must be a path that this command can use, but is not: ")
    assert named.endswith("Free some space, or choose another path.\n")


def test_too_small_address_space_is_told_before_a_library_aborts(fail, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (400_000_000, resource.RLIM_INFINITY))
    assert fail("train", *TINY) == (
        "`ulimit -v` must allow at least 1.5 GB of address space, but allows 0.4 GB. Raise the limit: ulimit -v "
        "unlimited"
    )


@pytest.mark.slow  # a process that imports PyTorch, with each limit
@pytest.mark.parametrize("limit", ["-n 12", "-v 400000"])
def test_limits_of_the_system_are_told_without_a_traceback(limit: str) -> None:
    told = subprocess.run(
        ["sh", "-c", f"ulimit {limit} && {sys.executable} -m crosscut verify model.num_layers=1 --layout tensor=2"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert told.returncode == 2
    assert "Raise the limit: ulimit" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layout", "data=100000000"], "on this machine, but is 100,000,000"),
        (["--layout", "pipeline=100000000"], "must leave at least one layer for each stage"),
        (["--layout", "data=2", "model.num_layers=1000000000"], "must be at most 10,000, but is 1,000,000,000"),
        (["layout.pipeline=2", "layout.stages=[100000000,2]"], "must add up to `model.num_layers` (2)"),
        (["--layout", f"tensor={10**40}"], "must be between -2^63 and 2^63"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_absurd_sizes_are_refused_at_once(fail, words: list[str], told: str) -> None:
    began = time.process_time()
    assert told in fail("verify", *TINY, *words)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(("rank", "size"), [("3", "8"), ("0", "8"), ("0", "1"), (None, None)])
def test_the_traceback_of_one_of_several_ranks_names_the_rank(rank, size, monkeypatch, capsys):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        _end(ZeroDivisionError("the sum of no rows"))
    told = capsys.readouterr().err.splitlines()
    assert (stop.value.code, told[-1]) == (1, "ZeroDivisionError: the sum of no rows")
    assert told[:-1] == ([f"Rank {rank} on {socket.gethostname()} has failed:"] if size == "8" else [])
