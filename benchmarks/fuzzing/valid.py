"""Valid inputs, made by Crosscut itself: configs, a run with checkpoints, a Hugging Face folder, sources, requests."""

import bz2
import gzip
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import brotli
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
import zstandard

from benchmarks.commands import run_crosscut
from benchmarks.fuzzing.repetition.patterns import record
from benchmarks.fuzzing.valid_tunings import EMBEDDING_REQUESTS, ENCODER, make_tunings
from benchmarks.recovery.runs import TINY
from benchmarks.texts import addresses

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)

RUN = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_sequence_length": 64, "vocab_size": 300,
              "dropout": 0.1},
    "layout": {"tensor": 2, "data": 1, "sequence_parallel": True},
    "data": {"text": ["missing/*.jsonl"], "tokenizer": "", "vocab_size": 300},
    "training": {"steps": 40, "batch_size": 4, "micro_batch_size": 2, "sequence_length": 32, "precision": "float32",
                 "recompute": "full", "offload": ["activations"], "device": "auto"},
    "optimizer": {"learning_rate": 3e-3, "min_learning_rate": 1e-4, "warmup_steps": 3},
    "checkpoint": {"every": 10, "keep": 2},
    "evaluation": {"every": 20, "lambada": "missing.jsonl"},
    "output": {"folder": "out", "sample_prompt": "A"},
}  # fmt: skip
TUNED = {"training": {"initialize_from": "hf", "sequence_length": 32, "batch_size": 4}}


def corpus_of(file: str) -> str:
    """Settings of a corpus with this source, as TOML."""
    return tomli_w.dumps({
        "folder": "out", "seed": 7,
        "sources": [{"name": "s", "files": [file, "more.jsonl"], "weight": 1.0}],
        "ingest": {"max_rejects": 0.5, "max_document_mb": 1, "part_mb": 1},
        "language": {"keep": []},
        "length": {"min_tokens": 0},
        "duplicates": {"jaccard": 0.7},
        "tokens": {"tokenizer": "tokenizer.json", "num_shards": 1, "train_to_validation": 3, "megatron": True},
        "engine": {"workers": 1},
    })  # fmt: skip


HEAD = """\
POST PATH HTTP/1.1\r
Host: 127.0.0.1\r
Content-Type: application/json\r
Accept: */*\r
Content-Length: LENGTH\r
Connection: close\r
\r
"""

TINY_RUN = (
    *TINY, "data.text=text.txt", "data.num_shards=1", "training.steps=4", "training.validation_sequences=4",
    "training.validate_every=0", "checkpoint.every=2", "output.folder=run",
)  # fmt: skip

SOURCES = ("s.jsonl", "s.jsonl.gz", "s.jsonl.zst", "s.parquet", "s.txt", "s.txt.gz", "s.html", "s.eml", "s.mbox",
           "s.xml", "s.xml.bz2", "s.idx", "s.warc", "s.warc.gz", "s.warc.zst", "s.warc.wet.gz", "s.arc")  # fmt: skip
"""Files of `sources`, one of each format, and one of a format that is not read."""

REQUESTS = {
    "completion": ("/v1/completions", {"prompt": "The state of", "max_tokens": 4, "temperature": 0, "stop": ["zq"]}),
    "many": ("/v1/completions", {"prompt": ["a", [65, 66]], "max_tokens": 3, "n": 2, "logprobs": 3, "echo": True,
                                 "logit_bias": {"70": -5}, "seed": 1, "top_p": 0.9}),
    "stream": ("/v1/completions", {"prompt": "a", "max_tokens": 40, "stream": True,
                                   "stream_options": {"include_usage": True}}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."},
                                                   {"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
                                      "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.1}),
    "chat-stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "stream": True,
                                             "max_completion_tokens": 20, "stop": "zq", "user": "u"}),
}  # fmt: skip
"""Path and body of valid requests, by name; the model's name is added."""

MODEL = "hf"
"""Folder of the model that is damaged, and served. The server takes the folder's name for the model's name."""


def make_valid(folder: Path, *, tensor: int) -> None:
    """Write all valid inputs to a folder. The run has `tensor` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_configs(folder)
    text = "\n\n".join(islice(addresses(), 8))[:40_000]
    assert len(text) > 20_000, len(text)
    (folder / "text.txt").write_text("\n\n".join([text[:20_000]] * 3), encoding="utf-8")
    run_crosscut("train", *TINY_RUN, f"layout.tensor={tensor}", folder=folder)
    run = folder / "run"
    for name in ("tensorboard", "loss.png"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    run_crosscut("checkpoint", "export", "run", MODEL, folder=folder)
    _write_companions(folder / MODEL)
    shutil.copyfile(folder / MODEL / "tokenizer.json", folder / "tokenizer.json")
    _write_sources(folder / "sources", text)
    _finish_corpus(folder)
    make_tunings(folder)
    _write_requests(folder / "embeddings", EMBEDDING_REQUESTS, ENCODER)
    _write_requests(folder / "requests", REQUESTS, MODEL)  # last: `make_valid` is not called again


def _write_configs(folder: Path) -> None:
    (folder / "run.toml").write_text(tomli_w.dumps(RUN))
    (folder / "corpus.toml").write_text(corpus_of("missing.jsonl"))
    (folder / "tuned.toml").write_text(tomli_w.dumps(TUNED))
    from crosscut import planner

    hardware = Path(planner.__file__).parent / "hardware"
    shutil.copyfile(hardware / "a100-80gb.toml", folder / "device.toml")
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b c"}\n')


def _write_companions(model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>", "add_bos_token": False,
              "model_max_length": 64, "chat_template": TEMPLATE}  # fmt: skip
    (model / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "bos_token_id": 0}, indent=1))
    (model / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|endoftext|>"}}, indent=1))


def _write_sources(folder: Path, text: str) -> None:
    folder.mkdir()
    rows = [{"text": text[i * 300 : i * 300 + 300], "url": f"https://a.example/{i}", "karma": 5 + i, "title": f"T{i}"}
            for i in range(12)]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "s.jsonl").write_bytes(lines)
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": text[i : i + 200]}) + "\n" for i in (9000, 9500)))
    (folder / "s.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "s.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    pq.write_table(pa.Table.from_pylist(rows), folder / "s.parquet")
    (folder / "s.txt").write_text(text[:3000], encoding="utf-8")
    (folder / "s.txt.gz").write_bytes(gzip.compress(text[:3000].encode(), mtime=0))
    page = f"<html><head><meta charset='utf-8'><title>T</title></head><body><p>{text[:2000]}</p></body></html>"
    (folder / "s.html").write_text(page, encoding="utf-8")
    mail = ("From: a@b.example\nTo: c@d.example\nSubject: =?utf-8?q?A_b?=\nDate: Mon, 1 Jan 2001 10:00:00 +0000\n"
            "Content-Type: multipart/alternative; boundary=XX\n\n--XX\nContent-Type: text/plain; charset=utf-8\n"
            f"Content-Transfer-Encoding: quoted-printable\n\n{text[:600]}\n--XX\nContent-Type: text/html\n\n"
            f"<p>{text[:600]}</p>\n--XX--\n")  # fmt: skip
    (folder / "s.eml").write_text(mail, encoding="utf-8")
    (folder / "s.mbox").write_text(f"From a@b.example Mon Jan  1 10:00:00 2001\n{mail}\n" * 3, encoding="utf-8")
    pages = "".join(f"<page><title>T{i}</title><ns>0</ns><id>{i}</id><revision><id>{i}</id><timestamp>2001-01-01T"
                    f"00:00:00Z</timestamp><text xml:space='preserve'>{{{{x|[[a|b]]}}}} {row['text']}</text></revision>"
                    "</page>\n" for i, row in enumerate(rows))  # fmt: skip
    dump = ("<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.11/' version='0.11' xml:lang='en'><siteinfo>"
            f"<sitename>W</sitename></siteinfo>{pages}</mediawiki>").encode()  # fmt: skip
    (folder / "s.xml").write_bytes(dump)
    (folder / "s.xml.bz2").write_bytes(bz2.compress(dump))
    _write_archives(folder, [row["text"] for row in rows])
    for source in SOURCES:
        (folder / f"{source}.toml").write_text(corpus_of(source))
    (folder / "s.arc").write_text("filedesc://s.arc 0.0.0.0 20260101000000 text/plain 0\n")


def _write_archives(folder: Path, texts: Sequence[str]) -> None:
    """Write a crawl: requests, and pages in the encodings of HTTP. A WET file has the texts of the pages."""
    encodings: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("Content-Encoding: gzip\r\n", partial(gzip.compress, mtime=0)),
        ("Content-Encoding: br\r\n", brotli.compress),
        ("Content-Encoding: zstd\r\n", zstandard.compress),
        ("Content-Encoding: deflate\r\n", zlib.compress),
        ("Transfer-Encoding: chunked\r\n", lambda body: b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        ("", bytes),
    ]
    records = [record("warcinfo", b"software: x\r\n", number=0)]
    for number, text in enumerate(texts):
        header, encode = encodings[number % len(encodings)]
        page = f"<html><head><meta charset='utf-8'><title>T</title></head><body><p>{text}</p></body></html>".encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n{header}\r\n".encode()
        records += [
            record("request", b"GET / HTTP/1.1\r\n\r\n", number=number),
            record("response", head + encode(page), number=number),
        ]
    (folder / "s.warc").write_bytes(b"".join(records))
    (folder / "s.warc.gz").write_bytes(b"".join(gzip.compress(record, mtime=0) for record in records))
    (folder / "s.warc.zst").write_bytes(b"".join(map(zstandard.ZstdCompressor(write_checksum=True).compress, records)))
    wet = [record("conversion", text.encode(), number=number) for number, text in enumerate(texts)]
    (folder / "s.warc.wet.gz").write_bytes(b"".join(gzip.compress(record, mtime=0) for record in wet))


def _finish_corpus(folder: Path) -> None:
    """Prepare a corpus to its end; its tokens in Megatron-LM's format are another source."""
    place = folder / "finished"
    place.mkdir()
    shutil.copyfile(folder / "sources" / "s.jsonl.toml", place / "corpus.toml")
    for name in ("s.jsonl", "more.jsonl"):
        shutil.copyfile(folder / "sources" / name, place / name)
    shutil.copyfile(folder / "tokenizer.json", place / "tokenizer.json")
    run_crosscut("prepare", "corpus.toml", folder=place)
    for suffix in (".idx", ".bin"):
        shutil.copyfile(place / "out" / "tokens" / f"train-0{suffix}", folder / "sources" / f"s{suffix}")


def _write_requests(folder: Path, requests: Mapping[str, tuple[str, Mapping[str, Any]]], model: str) -> None:
    for name, (path, body) in requests.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "head.txt").write_bytes(HEAD.replace("PATH", path).encode())
        (folder / name / "body.json").write_text(json.dumps({"model": model, **body}, indent=1))
