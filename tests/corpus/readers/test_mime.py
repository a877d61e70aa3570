"""Messages of any structure are read in time that grows with their length, and as Python's email package reads them."""

import email
import email.policy
import random
import time
from email.message import Message
from email.mime.message import MIMEMessage
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from pathlib import Path

import pytest

from crosscut.corpus.readers import Reject
from crosscut.corpus.readers.mail.mime import MAX_NESTING, Mail, MimePart
from tests.corpus.reads import read

MANY = 40_000
NESTED = 'Content-Type: multipart/mixed; boundary="b{0}"\n\n--b{0}\n'
TEXT = "Content-Type: text/plain; charset=utf-8"

HOSTILE = {
    "subject of encoded words": "Subject: " + "=?utf-8?q?a?= " * MANY,
    "subject of open words": "Subject: " + "=?a?q?" * MANY,
    "type of semicolons": TEXT + ";" * MANY,
    "type of quoted semicolons": TEXT + ';"' + ";" * MANY,
    "disposition of semicolons": "Content-Disposition: inline" + ";" * MANY,
    "disposition of pieces": "Content-Disposition: inline" + "; a*0*=b" * MANY,
    "charset in punycode": "Content-Type: text/plain; charset*=punycode''" + "a" * MANY + "-" + "a" * MANY,
    "folded type": TEXT + "\n ;" * MANY,
    "nested parts": "".join(map(NESTED.format, range(MAX_NESTING - 1))) + "--b\n" * MANY,
    "parts of one boundary": NESTED.format(0) * 90 + "\n\n--b0" * MANY,
    "boundaries inside a line": NESTED.format(0) + "--b0" * MANY,
    "alternatives": NESTED.format(0).replace("mixed", "alternative") * 90 + "\nx\n--b0" * MANY,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_message_is_read_in_a_moment(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.eml").write_text(HOSTILE[kind] + "\n\ntext\n")
    start = time.process_time()
    assert len(read(tmp_path / "a.eml")) == 1
    assert time.process_time() - start < 3


@pytest.mark.parametrize("kind", ["multipart/mixed; boundary=b", "multipart/alternative; boundary=b", "message/rfc822"])
def test_message_is_refused_at_the_same_depth_everywhere(tmp_path: Path, kind: str) -> None:
    level = f"Content-Type: {kind}\n\n" + "--b\n" * kind.startswith("multipart")
    results = []
    for depth in (MAX_NESTING, MAX_NESTING + 1):
        data = "".join(level.replace("b\n", f"b{n}\n") for n in range(depth)) + "\ntext\n"
        (tmp_path / "a.eml").write_text(data)
        (item,) = read(tmp_path / "a.eml")
        results.append(item.rule if isinstance(item, Reject) else item)
    assert results[0] != results[1] == "too complex"


def _texts(part: Message) -> list[tuple[str, bytes]]:
    if part.is_multipart():
        return [text for inner in part.get_payload() for text in _texts(inner)]
    body = part.get_payload(decode=True)
    return [(part.get_content_type(), body)] if part.get_content_maintype() == "text" and body else []


def _own(part: MimePart) -> list[tuple[str, bytes]]:
    if part.has_parts:
        return [text for inner in part.parts() for text in _own(inner)]
    return [(part.kind, part.decode())] if part.kind.startswith("text/") and part.decode() else []


def _tree(chance: random.Random, depth: int) -> Message:
    words = ["the", "naïve", "--", "--b", "--b--", "日本", "=", "From x", "--", ""]
    shape = chance.random()
    if depth > 3 or shape < 0.4:
        lines = [" ".join(chance.choices(words, k=chance.randrange(6))) for _ in range(chance.randrange(1, 9))]
        return MIMEText("\n".join(lines), chance.choice(["plain", "html"]), "utf-8")
    if shape < 0.5:
        return MIMEMessage(_tree(chance, depth + 1))
    made = MIMEMultipart(chance.choice(["mixed", "alternative", "related"]), boundary=chance.choice([None, "b b", "b"]))
    made.preamble, made.epilogue = chance.choice([None, "before"]), chance.choice([None, "after"])
    for _ in range(chance.randrange(1, 4)):
        made.attach(_tree(chance, depth + 1))
    return made


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_parts_are_those_of_the_email_package(line_end: bytes) -> None:
    chance = random.Random(7)
    for _ in range(60):
        raw = _tree(chance, 0).as_bytes().replace(b"\n", line_end)
        if chance.random() < 0.3:  # the end is missing
            raw = raw[: chance.randrange(len(raw))].rstrip() + line_end
        parsed = email.message_from_bytes(raw, policy=email.policy.compat32)
        assert _own(Mail(raw).open()) == _texts(parsed), raw
