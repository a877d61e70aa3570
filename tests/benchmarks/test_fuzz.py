"""The fuzzing benchmark in its short form, and every case that it has found."""

import json
import os
import select
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fuzz import Result, write_page
from benchmarks.fuzzing import calls, findings, sandbox, valid
from benchmarks.fuzzing.arrays import ARRAYS, names_of
from benchmarks.fuzzing.cases import Base, Case, cases_of, draw
from benchmarks.fuzzing.edits import Edit, apply
from benchmarks.fuzzing.kinds import KINDS
from benchmarks.fuzzing.repetition.run import SIZES, Rates, _judge, all_patterns, cases, limits
from benchmarks.fuzzing.worker import Figures, Setting, _run
from crosscut.config.published.keys import Keys
from tests.benchmarks.conftest import run_program
from tests.serving.conftest import write_tokenizer, write_weights

FOUND = sorted((Path(__file__).parent / "fuzz").glob("*.json"))
"""Cases that failed once: `case.json` of a finding, under a name that says what it is."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")


def test_edits_are_applied_in_one_order_and_missing_places_do_nothing(tmp_path):
    (tmp_path / "a.json").write_text('{"a": {"b": 1}, "c": [1, 2]}')
    edits = [
        Edit("a.json", "cut", (500, 0)),
        Edit("a.json", "set", ("a", "b"), "NaN"),
        Edit("a.json", "set", ("x", "y"), "NaN"),
        Edit("", "insert", (0,), "--option=@minus-one"),
        Edit("", "remove", (9,)),
    ]
    assert apply(edits, tmp_path, ["plan", "run.toml"]) == ["plan", "--option=-1", "run.toml"]
    text = (tmp_path / "a.json").read_text()
    assert '"b": NaN' in text
    assert '"c"' not in text


def test_every_damage_of_an_array_leaves_an_archive_that_can_be_read(tmp_path):
    for damage in (*ARRAYS, "missing"):
        np.savez_compressed(tmp_path / "a.npz", ids=np.arange(6, dtype=np.int32).reshape(3, 2), ends=np.array([3, 6]))
        before = (tmp_path / "a.npz").read_bytes()
        apply([Edit("a.npz", "array", ("ids",), damage)], tmp_path, [])
        assert names_of((tmp_path / "a.npz").read_bytes()) == (["ends"] if damage == "missing" else ["ids", "ends"])
        assert (tmp_path / "a.npz").read_bytes() != before, damage


def test_the_same_seed_draws_the_same_cases(tmp_path):
    (tmp_path / "a.toml").write_text("[model]\nlayers = 2\n")
    bases = (Base("plan", ("plan", "a.toml"), {"a.toml": "a.toml"}, kept=2, words=("--gpus", "model.layers")),)
    strategy = cases_of(bases, tmp_path)
    first, second = (draw(strategy, 3, "configs", 1) for _ in range(2))
    assert first == second
    assert [case.number for case in first] == list(range(100, 200))
    assert draw(strategy, 4, "configs", 1) != first
    assert Case.read(json.loads(json.dumps(first[0].to_json()))) == first[0]


def test_each_kind_of_failure_is_seen(tmp_path, monkeypatch):
    def wait() -> int:
        while True:
            pass

    def escape() -> int:
        print("\x1b]0;owned\x07")
        return 2

    behaviours = {
        "fail": lambda: 1 // 0,
        "allocate": lambda: len(bytearray(96 << 20)) and 2,
        "escape": escape,
        "status": lambda: 7,
        "well": lambda: 2,
        "wait": wait,
    }
    monkeypatch.setattr(calls, "CALLS", behaviours)
    monkeypatch.setattr(findings, "MEMORY_BYTES", 64 << 20)
    jobs = [sandbox.Job(tmp_path, (name,)) for name in behaviours]
    found = [
        [failure for failure, *_ in findings.judge(outcome, (2,), "dumb")] for outcome in sandbox.run(jobs, longest=3)
    ]
    assert found == [["traceback"], ["memory"], ["raw"], ["status"], [], ["hang"]]


def test_files_built_by_repetition_have_their_size_and_no_name_twice():
    patterns = all_patterns()
    assert len(cases()) == len(SIZES) * len(patterns)
    assert {case.base.split(": ")[1] for case in cases()[: len(patterns)]} >= {"html", "mail", "wikipedia", "warc"}
    for name, pattern in patterns.items():
        if not pattern.suffix.endswith((".gz", ".bz2", ".zst", ".parquet")):
            assert 0.9 * 64_000 < len(pattern.build(64_000)) < 2.3 * 64_000, name  # JSON escapes some


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"status": 0, "processor": 2.9, "peak": 200 << 20}, None),
        ({"status": 0, "processor": 3.1}, "slow"),
        ({"ended_by": "SIGPROF"}, "slow"),
        ({"status": 0, "peak": 300 << 20}, "memory"),
        ({"error": "MemoryError: "}, "memory"),
        ({"ended_by": "SIGSEGV"}, "crash"),
        ({"status": 1}, "status"),
    ],
)
def test_file_above_its_limits_is_a_finding(fields, failure):
    found = [kind for kind, _ in _judge(sandbox.Outcome(**fields), 10**6, *limits("html", 10**6), is_read=True)]
    assert found == [failure] * bool(failure)


def test_page_gets_the_figures_of_the_kinds_that_have_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- fuzz: begin -->old<!-- fuzz: end -->\n<!-- repetition: begin -->old<!-- repetition: end -->\n"
    )
    rates = Rates()
    rates.note(10**6, "open <p>", sandbox.Outcome(processor=0.5, peak=50 << 20))
    write_page(Result(0, {"repetition": 1}, {"repetition": Figures(cases=1, rates={"html": rates})}), page)
    assert "begin -->old<!-- fuzz" in page.read_text()
    assert "| html | 1 | 1 | 0.50 | 0.50 | `open <p>` | 50 | 52 | `open <p>` |" in page.read_text()
    write_page(Result(0, {"configs": 1}, {"configs": Figures(cases=1)}), page)
    assert "| configs and command lines | 1 of 1 | none |" in page.read_text()
    assert "`open <p>`" in page.read_text()


def test_fork_ends_with_a_killed_parent():
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        parent = os.getpid()
        if os.fork() == 0:
            sandbox.end_with(parent)
            os.write(write, b"x")
        signal.pause()
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert select.select([read], [], [], 30)[0], "the fork lives on"
    assert os.read(read, 1) == b""
    os.close(read)


def test_colours_of_tables_are_not_raw():
    assert not findings.raw_in(b"\x1b[1mtitle\x1b[0m\r\n", "xterm-256color")
    assert not findings.raw_in(b"\x1b[36mtitle\x1b[0m\r\n", "xterm-256color")
    assert findings.raw_in(b"\x1b[36mtitle\x1b[0m\r\n", "dumb")
    assert findings.raw_in(b"\x1b]0;owned\x07", "xterm-256color")
    assert findings.raw_in("\x9b2J".encode(), "xterm-256color")


@pytest.mark.slow
def test_every_kind_runs(tmp_path):  # starts a server, and imports PyTorch five times
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    sections = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("fuzz", "repetition"))
    page.write_text(f"before\n{sections}after\n")
    files = ("--json", figures, "--keep", tmp_path / "keep", "--write", page)
    done = run_program("fuzz.py", "--tiny", "--minutes", 6, *files, status=None, timeout=600)
    told = json.loads(figures.read_text())
    assert list(told["kinds"]) == [
        "configs", "requests", "folders", "checkpoints", "corpora", "embeddings", "tasks", "chats", "encoders",
        "metadata", "repetition",
    ]  # fmt: skip
    assert all(kind["cases"] for kind in told["kinds"].values()), done.stderr
    assert done.returncode == (0 if told["well"] else 1), done.stderr
    assert "requests to a running server" in page.read_text()
    for kind in told["kinds"].values():
        for finding in kind["findings"]:
            assert finding["failure"] and (finding["case"]["edits"] or finding["case"]["base"])


@pytest.mark.slow  # tests/pretrained/test_keys.py and tests/config/published hold the same tables
def test_a_key_that_is_not_refused_is_found(tmp_path, monkeypatch):
    from benchmarks.fuzzing.metadata import folders, run

    edits = [
        folders.Edit("llama LlamaForCausalLM", "config.json", ("hidden_act",), "relu"),
        folders.Edit("gpt2 GPT2LMHeadModel", "config.json", ("activation_function",), "relu"),
    ]
    monkeypatch.setattr(run, "draw", lambda models, seed, number: edits[number])
    for number in range(len(edits)):
        assert run.run_one(Case(run.METADATA, number, "", ()), 0, tmp_path)[0] == []
    monkeypatch.setattr(Keys, "check", lambda *_: "")
    for number, edit in enumerate(edits):
        (finding,), _ = run.run_one(Case(run.METADATA, number, "", ()), 0, tmp_path)
        assert finding.failure == "accepted" and finding.place.endswith(edit.path[0])


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid configs and a valid Hugging Face folder, whose making trains nothing."""
    folder = tmp_path_factory.mktemp("valid")
    valid._write_configs(folder)
    (folder / valid.MODEL).mkdir()
    write_weights(folder / valid.MODEL, write_tokenizer(folder / valid.MODEL))
    valid._write_companions(folder / valid.MODEL)
    return folder


CHEAP = [path for path in FOUND if json.loads(path.read_text())["kind"] in ("configs", "folders")]


@pytest.mark.parametrize("path", CHEAP, ids=lambda path: path.stem)
def test_found_cases_of_configs_and_folders_stay_mended(path, configs, tmp_path):
    case = Case.read(json.loads(path.read_text()))
    ((found, outcome),) = _run(KINDS[case.kind], [case], Setting(configs, tmp_path, None, 0), tmp_path)
    assert [(one.failure, one.place, one.detail) for one in found] == [], outcome.trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the command keeps all valid inputs for the next case. Making them trains models."""
    return tmp_path_factory.mktemp("whole") / "valid"


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FOUND if path not in CHEAP], ids=lambda path: path.stem)
def test_found_cases_stay_mended(path, whole):
    run_program("fuzz.py", "--tiny", "--valid", whole, "--replay", path)
