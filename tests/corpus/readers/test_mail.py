"""Messages, one to a file or many in an mbox."""

import gzip
from email.message import EmailMessage
from pathlib import Path

import pytest

from crosscut.corpus.readers import RawText, Skip
from tests.corpus.reads import read, rejects, skips, texts

FROM = b"From jo@example.org Sat Nov 21 22:44:22 2026\n"


def message(body: str, subject: str = "Hello", **parts: str) -> bytes:
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "jo@example.org", "al@example.org", subject
    mail.set_content(body)
    for kind, text in parts.items():
        mail.add_alternative(text, subtype=kind)
    return mail.as_bytes()


def write(folder: Path, data: bytes, name: str = "a.eml") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def titles(path: Path) -> list[str]:
    return [item.title for item in read(path) if isinstance(item, RawText)]


def test_message_is_a_document_with_its_subject(tmp_path: Path) -> None:
    data = message("Dear Al,\n\nall is well.\n", "Re: the\twhole naïve story")
    assert read(write(tmp_path, data)) == [
        RawText("Dear Al,\n\nall is well.\n", 1, len(data), title="Re: the whole naïve story")
    ]


def test_file_without_any_headers_is_a_body(tmp_path: Path) -> None:
    assert texts(read(write(tmp_path, b"\nonly a body\n"))) == ["only a body\n"]


def test_plain_text_goes_before_html_wherever_it_stands(tmp_path: Path) -> None:
    mail = EmailMessage()
    mail.make_alternative()
    mail.add_alternative("<p>formatted</p>", subtype="html")
    mail.add_alternative("plain", subtype="plain")
    assert texts(read(write(tmp_path, mail.as_bytes()))) == ["plain\n"]


def test_html_is_taken_where_there_is_no_plain_text(tmp_path: Path) -> None:
    assert texts(read(write(tmp_path, message(" \n", html="<p>the <b>only</b> text</p>")))) == ["the only text"]


def test_attachments_are_left_out_and_inline_parts_joined(tmp_path: Path) -> None:
    mail = EmailMessage()
    mail.set_content("first\n")
    mail.add_attachment("not this", filename="notes.txt")
    mail.add_attachment(b"\x89PNG", maintype="image", subtype="png")
    mail.add_attachment("second\n", disposition="inline")
    assert texts(read(write(tmp_path, mail.as_bytes()))) == ["first\n\n\nsecond\n"]


def test_forwarded_message_is_read(tmp_path: Path) -> None:
    inner, outer = EmailMessage(), EmailMessage()
    inner.set_content("what he wrote\n")
    outer.set_content("see below\n")
    outer.add_attachment(inner, disposition="inline")
    assert texts(read(write(tmp_path, outer.as_bytes()))) == ["see below\n\n\nwhat he wrote\n"]


def test_mbox_is_cut_at_its_from_lines_alone(tmp_path: Path) -> None:
    first = message("one\n\nFrom here on we walk.\n\n>From the start.\n")
    path = write(tmp_path, FROM + first + b"\n" + FROM + message("two\n") + b"\r\n" + FROM + message("three\n"))
    items = read(path, "mail")
    assert texts(items) == ["one\n\nFrom here on we walk.\n\nFrom the start.\n\n", "two\n\r\n", "three\n"]
    assert [item.record for item in items if isinstance(item, RawText)] == [1, 2, 3]


def test_mbox_is_cut_wherever_its_chunks_end(tmp_path: Path) -> None:
    bodies = [f"{n} " * (n * 37 % 4000 + 1) + "\n" for n in range(100)]
    path = write(tmp_path, b"\n".join(FROM + message(body) for body in bodies), "a.mbox")
    assert [text.rstrip() for text in texts(read(path))] == [body.rstrip() for body in bodies]


def test_message_that_is_too_long_is_rejected_and_its_neighbours_are_read(tmp_path: Path) -> None:
    long = b"Subject: long\n\n" + b"".join(b"line %d\n" % n for n in range(100_000))
    path = write(tmp_path, FROM + message("one") + b"\n" + FROM + long + b"\n" + FROM + message("two"))
    items = read(path, max_bytes=5000)
    assert texts(items) == ["one\n\n", "two\n"]
    assert rejects(items) == [("message 2", "too long")]


@pytest.mark.parametrize(
    ("header", "body", "text", "note"),
    [
        ("iso-8859-1", "café".encode("iso-8859-1"), "café", ""),
        ("us-ascii", "café".encode(), "café", "charset"),
        ("iso-2022-jp", b"\x1b$B\x2d\x21\x21\x41\x1b(B", "①\uff5e", ""),
        ("ks_c_5601-1987", "똠방각하".encode("cp949"), "똠방각하", ""),
        ("iso-8859-11", "“ไทย”".encode("cp874"), "“ไทย”", ""),
        ("utf-8", "un café fermé à Paris".encode("windows-1252"), "un café fermé à Paris", "charset"),
        ("x-unknown", "un café fermé à Paris".encode("windows-1252"), "un café fermé à Paris", "charset"),
    ],
)
def test_charsets_that_lie(tmp_path: Path, header: str, body: bytes, text: str, note: str) -> None:
    (item,) = read(write(tmp_path, f"Content-Type: text/plain; charset={header}\n\n".encode() + body))
    assert (item.text, item.note) == (text, note)


def test_message_of_no_charset_is_rejected(tmp_path: Path) -> None:
    (reject,) = read(write(tmp_path, b"Subject: x\n\n" + bytes(range(0x80, 0xA0)) * 50 + b"\xff\xfe\xfd" * 500))
    assert (reject.place, reject.rule) == ("message 1", "charset")


@pytest.mark.parametrize(
    ("header", "title"),
    [
        (b"=?utf-8?q?caf=C3=A9?= =?utf-8?q?_noir?=", "café noir"),
        (b"=?koi8-r?B?8NLJ18XU?=", "Привет"),
        (b"=?no-such?q?caf=C3=A9?=", "café"),
        ("naïve".encode("iso-8859-1"), "naïve"),
        (b"=?utf-8?b?broken?=", None),
        (b"folded\n over lines", "folded over lines"),
    ],
)
def test_subjects_are_decoded_as_far_as_they_can_be(tmp_path: Path, header: bytes, title: str | None) -> None:
    (found,) = titles(write(tmp_path, b"Subject: " + header + b"\n\nbody\n"))
    assert title in (None, found)
    assert found.encode()


def test_broken_messages_do_no_harm(tmp_path: Path) -> None:
    """Each of these once raised in some version of the library."""
    for data in (
        b"Content-Type: multipart/mixed\n\nno boundary\n",
        b'Content-Type: multipart/mixed; boundary="b"\n\n--b\n\nno end\n',
        b"Content-Transfer-Encoding: base64\n\n!!!not base64\n",
        b"Content-Type: text/plain; charset*=utf-8'en'%FF\n\nx\n",
        b"Content-Type: text/plain; charset=\x00\n\nx\n",
        b"Content-Transfer-Encoding: x-uuencode\n\nbegin 644 a\n\xff\xff\n",
        b"From: =?\nSubject: =?utf-8?q?=ZZ?=\nContent-Type: ;;;\n\nx\n",
    ):
        assert len(read(write(tmp_path, data))) == 1


def test_parts_nested_without_end_are_rejected(tmp_path: Path) -> None:
    data = b"".join(b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(1500))
    (reject,) = read(write(tmp_path, data + b"\ndeep\n"))
    assert (reject.place, reject.rule) == ("message 1", "too complex")


def test_message_without_text_is_passed_over(tmp_path: Path) -> None:
    assert read(write(tmp_path, b"Subject: nothing\n\n")) == [Skip("blank", 1)]
    assert read(write(tmp_path, b"")) == []


def test_messages_before_the_end_of_a_truncated_mbox_are_kept(tmp_path: Path) -> None:
    whole = b"\n".join(FROM + message(f"{n} " + "".join(chr(97 + n * k % 26) for k in range(500))) for n in range(300))
    packed = gzip.compress(whole)
    path = write(tmp_path, packed[: len(packed) // 2], "a.mbox.gz")
    items = read(path)
    assert len(texts(items)) > 50
    assert all(text.startswith(f"{n} ") for n, text in enumerate(texts(items)))
    assert rejects(items) == [(f"byte {len(packed) // 2}", "damaged file")]
    assert skips(items) == []
