"""A small real corpus with one of everything in it: what goes, why, what stays, and what is done again."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.corpus.languages import is_faulty, read_languages
from crosscut.config import ConfigError, CorpusConfig, CrosscutError, DataError, load_corpus
from crosscut.config.system.markers import MARKER_FILE
from crosscut.corpus import CorpusResult, explain_document, prepare_corpus, print_summary
from crosscut.corpus.documents import read_table
from crosscut.data import TokenFolder, Tokenizer, read_documents
from tests.disks import remount, small_disk
from tests.endless import ENDLESS
from tests.refusals import refusal

GERMAN = (
    "Der Minister hat gestern in einer langen Rede vor dem Parlament gesagt, dass die Regierung im kommenden Jahr "
    "neue Wege, Tunnel und Schulen bauen will, damit die Menschen in allen Teilen des Landes bessere Arbeit finden. "
) * 4
LEAKED = "the curious passage that nobody but the test set and this very document should ever have contained at all"
PAGE = 3000


@pytest.fixture(scope="session")
def pages() -> list[str]:
    """Pages of real speeches, each another one."""
    texts = [document.text for document in read_documents(["builtin:state-of-the-union"])]
    return [text[PAGE : 2 * PAGE].encode("ascii", "ignore").decode() for text in texts[20:60]]


@pytest.fixture(scope="session")
def raw(pages: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the corpus, and a test set."""
    folder = tmp_path_factory.mktemp("raw")
    near = pages[1].replace("the ", "these ", 6)
    web = [
        {"text": pages[0], "url": "https://example.org/a", "karma": 5},
        {"text": pages[1], "url": "https://example.org/b"},
        {"text": pages[2], "url": "http://www.example.org/b?utm_source=x"},  # the same address once more
        {"text": pages[3], "url": "https://example.org/c", "karma": 1},
        {"text": pages[4], "url": "https://example.org/c.jpg"},
        {"text": pages[5], "url": "https://i.imgur.com/c"},
        {"text": f"{pages[6]} It wasn\u00e2\u20ac\u2122t so."},
        {"text": GERMAN},
        {"text": "Far too short."},
        {"text": pages[0]},
        {"text": near},
        {"text": f"{pages[7]} {LEAKED} {pages[8]}"},
        *({"text": page} for page in pages[9:]),
    ]
    lines = [json.dumps(row) for row in web]
    lines.insert(3, '{"text": "cut sho')
    (folder / "web.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "test.jsonl").write_text(json.dumps({"text": f"A question about {LEAKED} indeed."}) + "\n")
    return folder


def describe(raw: Path, folder: Path, *overrides: str) -> CorpusConfig:
    table = {
        "folder": str(folder),
        "sources": [{"name": "web", "files": [str(raw / "web.jsonl")]}],
        "ingest": {"max_rejects": 0.1, "part_mb": 1},
        "leakage": {"test_sets": [str(raw / "test.jsonl")]},
        "tokens": {"vocab_size": 600, "num_shards": 2},
        "engine": {"workers": 1},
    }
    return load_corpus(table, overrides)


@pytest.fixture(scope="module")
def prepared(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> CorpusResult:
    """The corpus, made once for all tests that only look at it."""
    return prepare_corpus(describe(raw, tmp_path_factory.mktemp("corpus") / "out"), progress=False)


def went(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {
        stage["stage"]: {rule: amount["documents"] for rule, amount in stage["rules"].items()}
        for stage in report["flow"]
        if stage["rules"]
    }


def outcome(folder: Path) -> dict[str, str]:
    """Hashes of all that a corpus's users see but times, and of what every stage wrote."""
    files = [*(folder / "tokens").iterdir(), folder / "report.json"]
    files += [path for path in folder.glob("work/*/*") if path.suffix != ".json"]  # records tell times, too
    files = [path for path in files if path.name != MARKER_FILE]  # with a random id
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_each_rule_takes_what_it_is_for(prepared):
    assert went(prepared.report) == {
        "ingest": {"not JSON": 1},
        "urls": {"karma": 1, "file type": 1, "domain": 1},
        "url-duplicates": {"same url": 1},
        "language": {"language": 1},
        "length": {"too short": 1},
        "exact": {"same text": 1},
        "near": {"near-duplicate": 1},
    }


def test_what_stays_is_read_by_training_with_the_passage_cut_and_the_text_mended(prepared, pages):
    folder = Path(prepared.config.folder)
    tokens = TokenFolder.open(folder / "tokens", verify=True)
    tokenizer = Tokenizer.load(folder / "tokens" / "tokenizer.json")
    shards = (*tokens.train, tokens.validation)
    texts = [tokenizer.decode(shard.document(number)) for shard in shards for number in range(shard.num_documents)]
    assert pages[0] in texts
    assert f"{pages[6]} It wasn\u2019t so." in texts
    assert not any(LEAKED[20:80] in text for text in texts)
    before, after = pages[7].strip()[:1000], pages[8].strip()[-1000:]
    cut = [text for text in texts if text.startswith(before) or text.endswith(after)]
    assert len(cut) == 2, "what is left before and after the passage is a document each"
    assert len(texts) == len(pages[9:]) + 5
    names = {shard.origin(number)[0] for shard in shards for number in range(shard.num_documents)}
    assert names == {"web/web.jsonl"}


def test_right_sentences_of_twenty_languages_pass_all_stages_unchanged(shared, tmp_path):
    """Each document of the corpus is a language's sentences. With all of ftfy's steps, 17 of the 20 change."""
    languages = read_languages(shared / "data" / "lingua-sentences")
    texts = {name: "\n".join(one for one in sentences if not is_faulty(one)) for name, sentences in languages.items()}
    lines = [json.dumps({"text": text}) for text in texts.values()]
    (tmp_path / "web.jsonl").write_text("\n".join(lines) + "\n")
    settings = ("leakage.test_sets=[]", "language.keep=[]", "length.min_tokens=0", "tokens.objective=masked")
    config = describe(tmp_path, tmp_path / "out", *settings)
    result = prepare_corpus(replace(config, sources=(replace(config.sources[0], cleaners=("join_lines",)),)))
    parts = sorted(path for path in tmp_path.glob("out/work/cleaning/*.arrow") if ".drops" not in path.name)
    assert [text for path in parts for text in read_table(path)["text"].to_pylist()] == list(texts.values())
    assert result.report["summary"]["kept"]["documents"] == len(texts) == 20
    (cleaning,) = (stage for stage in result.report["flow"] if stage["stage"] == "cleaning")
    assert cleaning["changed"] == {"unicode": 0, "join_lines": 0}


def test_report_tells_of_the_leak_and_of_the_pairs(prepared):
    (found,) = prepared.report["leakage"]["sets"]
    assert (found["name"], found["documents_touched"]) == ("test.jsonl", 1)
    assert found["grams_found"] == len(LEAKED.split()) - 7
    (cluster,) = prepared.report["duplicates"]["clusters"]
    assert {document["id"] for document in cluster["documents"]} == {"web/web.jsonl#2", "web/web.jsonl#12"}
    assert (Path(prepared.config.folder) / "report.html").is_file()


def test_nothing_is_done_twice_and_a_setting_redoes_what_depends_on_it(prepared, raw, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(prepared.config.folder, folder)
    again = prepare_corpus(describe(raw, folder), progress=False)
    assert [stage.name for stage in again.stages if stage.num_run] == []
    assert again.report == prepared.report
    longer = prepare_corpus(describe(raw, folder, "length.min_tokens=129"), progress=False)
    redone = [stage.name for stage in longer.stages if stage.num_run]
    assert redone[0] == "length"
    assert "exact-keys" not in redone, "the same documents pass"
    straight = prepare_corpus(describe(raw, folder, "cleaning.uncurl_quotes=true"), progress=False)
    assert next(stage.name for stage in straight.stages if stage.num_run) == "cleaning"
    fewer = prepare_corpus(describe(raw, folder, "tokens.num_shards=1"), progress=False)
    assert "packing" in [stage.name for stage in fewer.stages if stage.num_run]
    assert len(TokenFolder.open(folder / "tokens", verify=True).train) == 1


@pytest.fixture
def copied(prepared: CorpusResult, tmp_path: Path) -> Path:
    """A copy of the corpus, to change."""
    folder = tmp_path / "out"
    shutil.copytree(prepared.config.folder, folder)
    for published in (folder / "tokens").glob("[!.]*"):  # linked, as a run leaves them
        published.unlink()
        os.link(folder / "work" / "packing" / published.name, published)
    return folder


@pytest.mark.parametrize("harm", [lambda data: data[:-10], lambda data: data[:-1] + b"x"], ids=["cut short", "changed"])
def test_shards_that_are_damaged_are_made_anew(copied, raw, harm):
    shard = copied / "work" / "packing" / "train-0.tokens"
    shard.write_bytes(harm(shard.read_bytes()))  # in place: the published file is the same one
    shutil.rmtree(copied / "tokens")
    config = describe(raw, copied)
    try:
        prepare_corpus(config, progress=False)
    except DataError as error:
        assert str(error) == (
            f"`{shard}` must be unchanged since it was written, but is damaged. Start `crosscut prepare` again to "
            "rewrite the shards."
        )
        prepare_corpus(config, progress=False)
    TokenFolder.open(copied / "tokens", verify=True)


def test_documents_end_as_what_lies_beside_their_tokenizer_says(prepared, copied, raw, tmp_path):
    """A change of it alone redoes the tokens; from a given tokenizer back to one that is trained leaves none of it."""
    given = shutil.copy(copied / "tokens" / "tokenizer.json", tmp_path / "tokenizer.json")
    for end in (0, 7):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end}))
        prepare_corpus(describe(raw, copied, f"tokens.tokenizer={given}"), progress=False)
        tokens = TokenFolder.open(copied / "tokens", verify=True)
        assert (tokens.end_of_text, int(tokens.validation.tokens[-1])) == (end, end)
    prepare_corpus(describe(raw, copied), progress=False)
    assert outcome(copied) == outcome(Path(prepared.config.folder))


def test_a_report_tells_why_too_little_is_left(copied, raw):
    told = message(describe(raw, copied, "length.min_tokens=100000"))
    assert told.startswith("The corpus must have at least 2 documents")
    assert went(json.loads((copied / "report.json").read_text()))["length"]["too short"] > 20
    assert "100000" in (copied / "config.toml").read_text()


def test_a_run_that_fails_leaves_the_settings_of_what_is_there(copied, raw, tmp_path):
    before = (copied / "config.toml").read_text()
    for name in ("web.jsonl", "test.jsonl"):
        shutil.copy(raw / name, tmp_path / name)
    (tmp_path / "web.jsonl").write_text("{}\n")
    assert "to be unreadable" in message(describe(tmp_path, copied))
    assert (copied / "config.toml").read_text() == before
    assert not (copied / "work" / "line.json").exists(), "nobody may take it for a run that has ended"


@pytest.mark.parametrize("engine", [(), ("engine.kind=ray", "engine.address=local")], ids=["local", "ray"])
def test_more_workers_than_the_machine_can_hold_leave_a_finished_corpus_finished(copied, raw, engine):
    told = message(describe(raw, copied, "engine.workers=100000", *engine), ConfigError)
    assert told.startswith("`engine.workers` must be at most ")
    assert told.endswith("Remove `engine.workers` to use one worker per core.")
    assert (copied / "work" / "line.json").exists()


def test_processes_make_the_same_bytes(prepared, raw, tmp_path):
    prepare_corpus(describe(raw, tmp_path / "out", "engine.workers=2"), progress=False)
    assert outcome(tmp_path / "out") == outcome(Path(prepared.config.folder))


RAY = """
import sys, tomllib
from pathlib import Path
from crosscut.config import load_corpus
from crosscut.corpus import prepare_corpus
prepare_corpus(load_corpus(Path(sys.argv[1]), ["engine.kind=ray", "engine.address=local", "engine.workers=2"]))
"""


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="keeping Ray to loopback takes root on Linux")
def test_ray_makes_the_same_bytes(prepared, raw, tmp_path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from crosscut.config import dump_toml

    config = tmp_path / "corpus.toml"
    config.write_text(dump_toml(describe(raw, tmp_path / "out")))
    # A network with nothing but loopback: Ray else takes an address of the machine and looks for it outside.
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command = [*alone, sys.executable, "-c", RAY, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "out") == outcome(Path(prepared.config.folder))


def message(config: CorpusConfig, kind: type[CrosscutError] = DataError) -> str:
    return refusal(kind, prepare_corpus, config, progress=False)


def test_one_process_at_a_time_prepares_a_folder(raw, tmp_path):
    import fcntl

    folder = tmp_path / "out"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = message(describe(raw, folder))
    assert said == (
        f"`{folder}` must be used by one `crosscut prepare` at a time, but another process is using it. "
        "Wait until that process has ended, or choose another `folder`."
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ('leakage.test_sets=["corpus.arrow"]', "corpus.arrow"),
        ("tokens.tokenizer=nowhere.json", "`nowhere.json` must be a readable `tokenizer.json`, but is not"),
        ('leakage.test_sets=["nowhere.txt"]', "`nowhere.txt` must be a readable file, but is not"),
        ('urls.domains=["nowhere.txt"]', "nowhere.txt"),
        ("folder=/dev/null/out", "`folder` must be writable, but `/dev/null/out` is not"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_read(raw, tmp_path, override, told):
    folder = tmp_path / "out"
    assert told in message(describe(raw, folder, override))
    assert not (folder / "work").exists()


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize(
    "setting", ["leakage.test_sets=[{}]", "urls.domains=[{}]", "urls.types=[{}]", "tokens.tokenizer={}"]
)
def test_list_whose_reading_may_never_end_is_refused(raw, tmp_path, kind, setting):
    path = tmp_path / "list.txt"
    ENDLESS[kind](path)
    override = setting.format(f'"{path}"' if "[" in setting else path)
    told = message(describe(raw, tmp_path / "out", override))
    assert f"`{path}`" in told
    assert f": It is {kind}, not a regular file. " in told


def test_damage_that_is_allowed_is_told_at_the_end(pages, tmp_path):
    lines = "".join(json.dumps({"text": page}) + "\n" for page in pages)
    (tmp_path / "web.jsonl").write_text(lines[:-100])
    settings = ("leakage.test_sets=[]", "language.keep=[]")
    told = message(describe(tmp_path, tmp_path / "out", *settings))
    assert told.startswith(
        "`ingest.max_damaged_files` allows 0 damaged files, but the corpus has 1. First damaged file: "
    )
    assert f": `{tmp_path}/web.jsonl`, line 40, after 39 documents: the file ends in the middle of a record" in told
    config = describe(tmp_path, tmp_path / "out", *settings, "ingest.max_damaged_files=1")
    result = prepare_corpus(config, progress=False)
    assert "ingest" not in [stage.name for stage in result.stages if stage.num_run], "nothing is read again"
    assert result.report["damaged"] == [{"name": "web/web.jsonl", "place": "line 40", "documents": 39}]
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="standard")
    print_summary(config, result.report, console)
    shown = console.file.getvalue()
    assert "31mdamaged" in shown
    assert (
        "1 file was read up to the damage (`ingest.max_damaged_files` allows this): web/web.jsonl after 39 documents"
        in shown
    )


def test_full_disk_is_told_and_the_same_command_goes_on(raw, tmp_path):
    with small_disk(tmp_path / "disk", 150) as disk:
        folder = disk / "out"
        told = message(describe(raw, folder))
        assert re.search(
            r"writing failed: No space left on device \(\d\.\d MB are free\)\. Finished tasks are kept\.", told
        )
        assert told.endswith("Free some space or choose another `folder`, then start the same command again.")
        assert not (folder / "tokens").exists()
        remount(disk, "size=8m")
        prepare_corpus(describe(raw, folder), progress=False)
        TokenFolder.open(folder / "tokens", verify=True)


def test_read_only_folder_is_told_before_anything_is_read(raw, tmp_path):
    (tmp_path / "web.jsonl").write_text("not JSON")
    (tmp_path / "test.jsonl").write_text('{"text": "some text"}')
    with small_disk(tmp_path / "disk", 1000) as disk:
        (disk / "old").mkdir()
        for name in ("work", ".lock"):
            (disk / "old" / name).mkdir() if name == "work" else (disk / "old" / name).touch()
        remount(disk, "ro")
        for folder in (disk / "new", disk / "old"):
            assert message(describe(tmp_path, folder)) == (
                f"`folder` must be writable, but `{folder}` is not: Read-only file system. Choose another `folder`."
            )


def flip(path: Path) -> None:
    """Change a bit as a bad disk does, which leaves the file's time as it was."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def unlink_both(path: Path) -> None:
    path.unlink()
    (path.parents[1] / "work" / "packing" / path.name).unlink()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "harm", "is_told"),
    [
        ("train-0.tokens", flip, True),
        ("validation.index", flip, True),
        ("manifest.json", flip, True),
        ("tokenizer.json", flip, True),
        ("train-1.tokens", lambda path: os.truncate(path, 100), False),  # every stage notices another size itself
        ("train-1.tokens", Path.unlink, False),
        ("train-1.index", unlink_both, False),
        ("manifest.json", unlink_both, False),
    ],
)
def test_damage_to_a_finished_corpus_does_not_pass_for_done(prepared, copied, raw, name, harm, is_told):
    harm(copied / "tokens" / name)
    if is_told:
        assert message(describe(raw, copied)) == (
            f"`{copied}/work/packing/{name}` must be unchanged since it was written, but is damaged. Start "
            "`crosscut prepare` again to rewrite the shards."
        )
    prepare_corpus(describe(raw, copied), progress=False)
    assert outcome(copied) == outcome(Path(prepared.config.folder))


def test_damaged_copy_of_a_shard_is_replaced(prepared, copied, raw):
    """As on a disk that has no links."""
    shard = copied / "tokens" / "train-0.tokens"
    shutil.copy(shard, shard.with_name("copy"))
    shard.with_name("copy").replace(shard)
    prepare_corpus(describe(raw, copied), progress=False)
    flip(shard)
    prepare_corpus(describe(raw, copied), progress=False)
    assert outcome(copied) == outcome(Path(prepared.config.folder))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rename_shard(path: Path) -> None:
    path.write_text(path.read_text().replace('"train-0"', '"../../train-0"'))


KEPT, REJECTED = "web/web.jsonl#1", "web/web.jsonl#4"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("document", "pattern", "harm", "told"),
    [
        (KEPT, "packing/manifest.json", cut, "`{}` must be valid JSON, but is not: "),
        (KEPT, "packing/manifest.json", lambda path: path.write_text("[" * 99_999), "nested too deeply"),
        (KEPT, "packing/manifest.json", lambda path: path.write_text("{}"), "`{}` must have format 'crosscut-tokens'"),
        (KEPT, "packing/manifest.json", rename_shard, "name without its folder, but is '../../train-0'"),
        (KEPT, "packing/manifest.json", replace_by_pipe, "`{}` must be a readable file, but is not: "),
        (KEPT, "packing/train-0.index", replace_by_pipe, "but a file cannot be read: "),
        (KEPT, "ingest/*0.arrow", cut, "but a file cannot be read: "),
        (REJECTED, "ingest/*.rejects.jsonl", cut, "`{}`, line 1, must be unchanged since `crosscut prepare` wrote it"),
        (REJECTED, "ingest/*.rejects.jsonl", lambda path: path.write_text('{"rule": 1}'), "not a JSON object with"),
        (REJECTED, "ingest/*.rejects.jsonl", replace_by_pipe, "`{}` must be a readable file, but is not: "),
    ],
)  # fmt: skip
def test_damaged_file_of_a_corpus_is_told_by_explain(copied, raw, document, pattern, harm, told):
    config = describe(raw, copied)
    assert document in explain_document(config, document)
    (path,) = (copied / "work").glob(pattern)
    harm(path)
    assert told.format(path) in refusal(DataError, explain_document, config, document)
