"""No command loses or changes a file, a folder or the target of a link that Crosscut did not make.

Each case puts foreign things in the places that a command writes to or clears. Some do not hinder the command: it
succeeds, and they stay. Others have a name that the command needs: the command says so and stops, and they stay.
"""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import TINY
from tests.finetuning.chat.conftest import chats, model, write_chats
from tests.pretrained.conftest import published
from tests.pretrained.encoders import make_encoder

__all__ = ["model", "published"]

DEAD = f"{socket.gethostname()}.999999999"
"""Machine and number of a process that no longer runs, as in the names of temporary folders."""
TRAIN = ("train", *TINY, "model.num_layers=1", "training.steps=2", "training.device=cpu", "data.text=book.txt")
CHAT = (
    "finetune", "chat", "chats.jsonl", "--model", "model", "--output", "out", "--lora-rank", "2",
    "training.batch_size=4", "training.sequence_length=64", "training.steps=1", "training.device=cpu",
)  # fmt: skip
TASK = (
    "finetune", "table", "--model", "run", "--train", "train.tsv", "--dev", "dev.tsv", "--text", "text",
    "--label", "label", "--output", "out",
    "training.steps=1", "training.device=cpu", "training.sequence_length=32",
)  # fmt: skip
OF_RUN = (
    "config.toml", "metrics.jsonl", "loss.png", "sample.txt", "summary.json", "labels.json", "restarts.jsonl",
    "experts.jsonl", "experts.png",
    ".in-memory", ".lock", ".crosscut", "tensorboard/", "profile/", "checkpoints/", "initial/", "spikes/", "watch/",
    "summary.json@", "metrics.jsonl@", "loss.png@", "tensorboard/@", "checkpoints/@", "watch/@", ".lock@",
)  # fmt: skip
"""Names that a run needs for itself. A name with `/` is planted as a folder with a file, one with `@` as a link."""


class Case(NamedTuple):
    """A command, and the places of foreign things."""

    command: Sequence[str]
    stays: Sequence[str] = ()
    """Places that do not hinder the command."""
    refused: Sequence[str] = ()
    """Places that the command needs. In each, a foreign thing makes the command stop."""
    status: int = 0
    """Exit status if nothing hinders the command."""


def under(folder: str, names: Sequence[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


READ = (
    "run/notes.txt", "run/mine/", "run/link@", "run/checkpoints/notes.txt", "run/checkpoints/.step-00000001.partial/",
)  # fmt: skip
"""Foreign things in the folder of a run that a command only reads."""

CASES = {
    "train": Case(
        (*TRAIN, "output.folder=new", "checkpoint.folder=ck", "checkpoint.keep=1", "checkpoint.every=1"),
        ["new/notes.txt", "new/mine/", "new/link@", "new/hang-step-0.txt", "ck/notes.txt", "ck/mine/", "ck/step-1/",
         "ck/damaged-step-00000001/", f"new/.tokens.unfinished.{DEAD}/", f"new/.tokens.unfinished.{DEAD}.old/"],
        [*under("new", OF_RUN), "ck/step-00000001/", "ck/.step-00000002.partial/", "ck/.step-00000001.dropped/",
         "ck/.step-00000002.partial/@", "new/tokens/"],
    ),
    "resume": Case(
        ("train", "run/config.toml", "--resume", "training.steps=4", "checkpoint.keep=1", "checkpoint.every=1"),
        ["run/notes.txt", "run/mine/", "run/checkpoints/notes.txt", "run/checkpoints/step-00000001/",
         "run/checkpoints/step-00000002/notes.txt", "run/watch/rank-00000@", "run/checkpoints/.step-00000001.partial/",
         "run/checkpoints/damaged-step-00000002/"],
        [*under("run", ("summary.json@", "tensorboard/@", "checkpoints/.step-00000003.partial/", "loss.png@",
                        "checkpoints/.step-00000004.dropped/", "watch/@", "spikes/@"))],
    ),
    "in memory": Case(
        ("train", "run/config.toml", "--resume", "training.steps=4", "checkpoint.in_memory=1", "checkpoint.every=2"),
        ["mem/crosscut-{uid}/mine/", "mem/crosscut-{uid}/notes.txt", "mem/mine/", "mem/crosscut-{uid}/link/@"],
        ["mem/crosscut-{uid}/{place}/", "mem/crosscut-{uid}/{place}/@", "mem/crosscut-{uid}/@", "run/.in-memory@"],
    ),
    "prepare tokens": Case(
        ("prepare", *TINY, "data.text=book.txt", "data.tokens=new/tokens"),
        ["new/notes.txt", "new/mine/", "new/config.toml", f"new/.tokens.unfinished.{DEAD}/",
         f"new/.tokens.unfinished.{DEAD}.old/", f"new/.tokens.unfinished.{DEAD}0/@"],
        ["new/tokens/", "new/tokens"],
    ),
    "prepare corpus": Case(
        ("prepare", "corpus.toml"),
        ["proj/notes.txt", "proj/mine/", "proj/thesis/work/", f"proj/.tokens.unfinished.{DEAD}.old/"],
        under("proj", ("config.toml", "report.json", "report.html", "timings.json", "work/", "work/mine/", "tokens/",
                       "work/ingest/", "config.toml@", "report.json@", ".lock@", "tokens/@", "work/@", "work/line.json",
                       ".crosscut", "work/.workers.lock@")),
    ),
    "prepare corpus again": Case(
        ("prepare", "corpus.toml", "language.keep=[]", "tokens.num_shards=1"),
        ["again/notes.txt", "again/work/mine/", "again/work/thesis.txt", "again/work/ingest/notes.txt",
         "again/work/ingest/mine/", "again/work/language/notes.txt", "again/work/near/mine/", "again/work/ingest/link@",
         "again/work/ingest/.x.unfinished/", f"again/.tokens.unfinished.{DEAD}.old/", "again/work/packing/mine.tokens",
         "again/work/link/@"],
        under("again", ("tokens/mine.txt", "work/ingest/@")),
    ),
    "chat": Case(
        CHAT, ["out/notes.txt", "out/mine/", ".out.partial/"],
        under("out", (*OF_RUN, "chat/", "adapter/", "chat/@", "tokens/", "initial/@")),
    ),
    "task": Case(
        TASK, ["out/notes.txt", "out/mine/"],
        under("out", (*OF_RUN, "task.json", "data/", "data/@", "outputs-dev.npy@")),
    ),
    "export": Case(
        ("checkpoint", "export", "run", "out"), ["notes.txt", ".other.partial/", ".out.dropped/"],
        ["out/", "out/@", ".out.partial/", ".out.partial/@"],
    ),
    "repair": Case(
        ("checkpoint", "repair", "run"),
        ["run/checkpoints/.step-00000001.partial/", "run/checkpoints/.step-00000009.dropped/",
         "run/checkpoints/step-00000009/", "run/checkpoints/notes.txt", "run/checkpoints/.step-00000003.partial/@",
         "run/checkpoints/damaged-step-00000009/"],
    ),
    "evaluate": Case(
        ("evaluate", "run", "--text", "book.txt", "--window", "32", "--output", "scores.json"),
        ["run/notes.txt", "run/mine/", "notes.txt", f".scores.json.{os.getpid()}@"],
    ),
    "generate": Case(("generate", "run", "--prompt", "It", "--tokens", "2"), ["run/notes.txt", "run/mine/"]),
    "plan": Case(
        ("plan", "run/config.toml", "training.device=auto", "--gpu", "h100-sxm",
         "--write", "plan.toml", "--html", "plan.html"),
        ["notes.txt", f".plan.toml.{os.getpid()}@", f".plan.html.{os.getpid()}@"],
        ["plan.toml/", "plan.html/"],
    ),
    "study": Case(("study", "scaling", "--output", "out"), ["out/notes.txt", "out/mine/"]),
    "inspect": Case(("checkpoint", "inspect", "run"), READ),
    "verify files": Case(("checkpoint", "verify", "run"), READ),
    "diff": Case(("checkpoint", "diff", "run", "run"), READ),
    "adapter": Case(
        ("checkpoint", "adapter", "lora", "out"), ["notes.txt", ".other.partial/", "lora/notes.txt", "lora/mine/"],
        ["out/", "out/@", ".out.partial/", ".out.partial/@"],
    ),
    "verify": Case(("verify", "run/config.toml", "--layout", "tensor=1"), ["notes.txt", "mine/", *READ]),
    "explain": Case(
        ("prepare", "corpus.toml", 'folder="again"', "--explain", "a/pages.jsonl#3"),
        ["again/notes.txt", "again/work/mine/", "again/work/ingest/notes.txt", "again/work/link/@",
         "again/tokens/mine.txt"],
    ),
    "embed": Case(
        ("embed", "encoder", "--text", "the fox", "--device", "cpu"),
        ["encoder/notes.txt", "encoder/mine/", "notes.txt"],
    ),
    "lm-eval": Case(
        ("lm-eval", "--model", "crosscut", "--model_args", "pretrained=run", "--tasks", "tiny_choice",
         "--include_path", "tasks", "--device", "cpu", "--output_path", "scores"),
        ["scores/notes.txt", "scores/mine/", *READ],
    ),
    "doctor": Case(("doctor", "--attach", "run"), ["run/watch/notes.txt", "run/watch/mine/"], status=2),
}  # fmt: skip

SLOW = {"in memory", "task", "chat", "study", "evaluate", "generate", "plan", "verify", "embed", "adapter", "lm-eval"}
"""Commands that only write files that the user names, or whose code for folders the quick cases run."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, book, model) -> Path:
    """A folder with a run, a corpus, and the files that the commands need."""
    from crosscut.config import load_corpus, load_run
    from crosscut.corpus import prepare_corpus
    from crosscut.training import run_training

    folder = tmp_path_factory.mktemp("whole")
    shutil.copyfile(book, folder / "book.txt")
    pages = book.read_text().split("\n\n")
    (folder / "pages.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(pages[i : i + 4])}) + "\n" for i in range(40))
    )
    (folder / "corpus.toml").write_text(
        '[[sources]]\nname = "a"\nfiles = ["pages.jsonl"]\n[tokens]\nvocab_size = 400\nnum_shards = 2\n'
        "[engine]\nworkers = 1\n"
    )
    shutil.copytree(model, folder / "model")
    write_chats(folder / "chats.jsonl", chats(24))
    for part in ("train", "dev"):
        rows = "".join(f"the {('fox', 'dog')[i % 2]} {i}\t{i % 2}\n" for i in range(8))
        (folder / f"{part}.tsv").write_text(f"text\tlabel\n{rows}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_training(load_run({}, [*TRAIN[1:], "output.folder=run", "checkpoint.every=1"]))
        prepare_corpus(load_corpus(folder / "corpus.toml", ['folder="again"']), progress=False)
    return folder


@pytest.fixture
def here(whole, tmp_path, monkeypatch) -> Path:
    """A copy of the folder, in which the command runs, and a folder of the user beside it."""
    shutil.copytree(whole, tmp_path / "here")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "thesis.txt").write_text("years of work")
    (tmp_path / "here" / "mem").mkdir()
    monkeypatch.setenv("CROSSCUT_MEMORY_FOLDER", str(tmp_path / "here" / "mem"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def place_of(here: Path, place: str) -> Path:
    """Path of a place."""
    from crosscut.checkpoint.in_memory import memory_folder

    return here / place.format(uid=os.getuid(), place=memory_folder(here / "run").name).rstrip("@/")


def plant(here: Path, place: str) -> Path:
    """Put a foreign file, a folder with a file (`/` at the end), or a link (`@`) in a place. Returns its path."""
    path = place_of(here, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if place.endswith("@"):
        path.symlink_to(here.parent / "outside" / ("" if "/@" in place else "thesis.txt"))
    elif place.endswith("/"):
        path.mkdir()
        (path / "mine.txt").write_text(place)
    else:
        path.write_text(place)
    return path


def states(path: Path) -> Iterator[tuple[str, str]]:
    """Everything at and below a path: files with their content, links with their targets, and folders."""
    if path.is_symlink():
        yield str(path), f"link to {path.readlink()}"
    elif path.is_dir():
        yield str(path), "folder"
        for inner in path.iterdir():
            yield from states(inner)
    elif path.exists():
        yield str(path), path.read_text()


def train_adapters(here: Path) -> None:
    from crosscut.config import load_run
    from crosscut.training import run_training

    run_training(load_run({}, [*TRAIN[1:], "output.folder=lora", "model.lora_rank=2"]))


def write_lm_eval_tasks(here: Path) -> None:
    if find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    from tests.harness.test_harness import DATA, QUESTIONS, TASKS

    (here / "tasks").mkdir()
    file = here / "tasks" / "questions.jsonl"
    file.write_text("".join(json.dumps({**question, "written": "fox"}) + "\n" for question in QUESTIONS))
    (here / "tasks" / "tiny_choice.yaml").write_text(TASKS["tiny_choice"] + DATA.format(file=file))


PREPARED = {
    "adapter": train_adapters,
    "embed": lambda here: make_encoder(here / "encoder", "bert"),
    "lm-eval": write_lm_eval_tasks,
}
"""What a command needs that no other command does."""


@contextmanager
def unharmed(here: Path, places: Sequence[str]) -> Iterator[None]:
    """Put foreign things in these places. Nothing of them may be lost or changed in the block."""
    planted = [plant(here, place) for place in places]
    before = {path: state for place in [*planted, here.parent / "outside"] for path, state in states(place)}
    yield
    lost = {path: state for path, state in before.items() if (path, state) not in set(states(Path(path)))}
    assert not lost
    outside = dict(states(here.parent / "outside"))
    assert outside.items() <= before.items(), "nothing is written to the folder of the user"


def run_with(crosscut_here, here: Path, case: Case, places: Sequence[str]):
    """Run a command with foreign things in these places."""
    command = [*case.command, *(['folder="proj"'] if case is CASES["prepare corpus"] else [])]
    command += ['folder="again"'] if case is CASES["prepare corpus again"] else []
    with unharmed(here, places):
        result = crosscut_here(*command)
        print(result.stdout, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_foreign_things_stay_and_do_not_hinder(crosscut_here, here, name):
    PREPARED.get(name, lambda _: None)(here)
    result = run_with(crosscut_here, here, CASES[name], CASES[name].stays)
    assert result.returncode == CASES[name].status, result.stdout + result.stderr


REFUSED = [(name, place) for name, case in CASES.items() for place in case.refused]


@pytest.mark.one_in(11)
@pytest.mark.parametrize(("name", "place"), REFUSED, ids=lambda value: value)
def test_foreign_thing_whose_name_is_needed_stops_the_command(crosscut_here, here, name, place):
    PREPARED.get(name, lambda _: None)(here)
    result = run_with(crosscut_here, here, CASES[name], [place])
    assert result.returncode == 2, result.stdout + result.stderr
    path = place_of(here, place).relative_to(here)
    assert any(f"{each}`" in result.stderr for each in (path, path.parent)), "the message names it, or its folder"


@pytest.mark.slow  # starts a server
def test_server_leaves_foreign_things(fork, here, tmp_path):
    """Of an encoder and of a run."""
    make_encoder(here / "encoder", "bert")
    for place in ("run", "encoder"):
        with unharmed(here, [*READ, "encoder/notes.txt", "encoder/mine/"]):
            server = fork("serve", str(here / place), "--port", "0", "--device", "cpu")
            deadline = time.monotonic() + 120
            while "http://" not in (tmp_path / "stdout").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(server.pid, signal.SIGTERM)
            status, output, errors = server.ended()
        assert "http://" in output and "Traceback" not in errors, (status, output, errors)


KEYS = {
    "absolute": "{outside}", "above": "../../../../outside", "file": "{outside}/thesis.txt", "place": ".",
    "parent": "..", "empty": "", "long": "0" * 17, "another letter": "g" * 16, "two lines": "0123456789abcdef\n../..",
}  # fmt: skip


@pytest.mark.parametrize("key", [pytest.param(k, marks=() if k == "absolute" else pytest.mark.slow) for k in KEYS])
def test_key_in_a_runs_folder_is_never_a_path(crosscut_here, here, key):
    """Everything beside the path was once removed when the run was resumed."""
    (here.parent / "beside").mkdir()
    (here.parent / "beside" / "photos.txt").write_text("mine")
    (here / "run" / ".in-memory").write_text(KEYS[key].format(outside=here.parent / "outside"))
    result = run_with(crosscut_here, here, CASES["in memory"], ["mem/mine/"])
    assert result.returncode == 0, result.stderr
    assert "`run/.in-memory` must hold a key of 16 hexadecimal digits, but does not." in result.stderr
    assert (here.parent / "beside" / "photos.txt").read_text() == "mine"
    assert [path.name for path in (here / "mem").iterdir()] != [], "the run kept checkpoints in memory"


def without_markers(folder: Path) -> None:
    """Make a folder as versions before the markers left it."""
    for marker in folder.rglob(".crosscut"):
        marker.unlink()


def test_run_without_markers_resumes_and_names_what_it_may_not_remove(crosscut_here, here):
    without_markers(here)
    result = run_with(crosscut_here, here, CASES["resume"], [])
    assert result.returncode == 0, result.stderr
    old = [f"run/checkpoints/step-0000000{number}" for number in (1, 2)]
    assert all(result.stderr.count(f"crosscut: `{path}` stays, because ") == 1 for path in old), "each is named once"
    assert all(f"remove it with `rm -r {path}`." in result.stderr for path in old)
    assert sorted(path.name for path in Path("run/checkpoints").glob("step-*")) == [
        *map(os.path.basename, old),
        "step-00000004",
    ]


def test_draft_that_an_old_version_left_is_named_before_the_run_would_need_its_place(crosscut_here, here):
    draft = here / "run" / "checkpoints" / ".step-00000003.partial"
    shutil.copytree(here / "run" / "checkpoints" / "step-00000002", draft)
    without_markers(here)
    refused = run_with(crosscut_here, here, CASES["resume"], [])
    assert refused.returncode == 2
    command = "rm -r run/checkpoints/.step-00000003.partial"
    assert f"remove it with `{command}`." in refused.stderr
    shutil.rmtree(draft)
    assert run_with(crosscut_here, here, CASES["resume"], []).returncode == 0


def test_corpus_without_markers_keeps_its_finished_tasks(crosscut_here, here):
    """As a copy without hidden files."""
    without_markers(here)
    refused = run_with(crosscut_here, here, CASES["prepare corpus again"], ["again/work/mine/"])
    assert refused.returncode == 2
    assert f"remove it with `rm -r {here}/again/tokens`. Then start again." in refused.stderr
    assert "`again/work/mine` stays" in refused.stderr
    assert not (here / "again" / "work" / "language").exists(), "a stage that is no more goes"
    shutil.rmtree(here / "again" / "tokens")
    assert run_with(crosscut_here, here, CASES["prepare corpus again"], []).returncode == 0
    manifest = json.loads((here / "again" / "tokens" / "manifest.json").read_text())
    assert len(manifest["train"]) == 1, "the tokens are replaced"


@pytest.mark.slow  # a whole run
def test_run_whose_start_was_killed_before_its_first_file_starts_again(crosscut_here, here):
    """The lock, and a folder whose marker was not yet written."""
    Path("new/tensorboard").mkdir(parents=True)
    Path("new/.crosscut").write_text('{"id": "00112233445566ff", "folder": ""}')
    Path("new/.lock").touch()
    os.utime("new/.lock", (1, 1))
    crosscut_here(*CASES["train"].command, status=0)
