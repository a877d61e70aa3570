"""The corpus of manuals is read from the files of unpacked packages, each file once."""

import gzip
from pathlib import Path

from benchmarks.corpus.manuals import build_manuals, read_manuals


def test_manuals_of_all_kinds_are_read_once(tmp_path: Path) -> None:
    share = tmp_path / "usr" / "share"
    texts = {
        "doc/linux/Documentation/a.rst.gz": "A page of the kernel.",
        "doc/linux/Documentation/b.yaml.gz": "title: a binding",
        "doc/linux/Documentation/logo.svg.gz": "<svg/>",
        "doc/linux/Documentation/g.txt.gz": "Plain notes.",
        "perl/pod/c.pod": "=head1 NAME",
        "man/man3/d.3.gz": ".TH D 3",
        "man/man5/latin.5.gz": "caf\u00e9",
        "doc/linux/html/_sources/a.rst.txt": "A page of the kernel.",
    }
    for name, text in texts.items():
        path = share / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text.encode("latin-1")
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    page = "<html><body><main><p>The text of a page.</p></main></body></html>"
    (share / "doc/linux/html/e.html").write_text(page)
    (share / "doc/again").symlink_to(share / "doc/linux/html")
    (share / "man/man3/f.3.gz").symlink_to("d.3.gz")
    assert sorted(read_manuals(tmp_path)) == [
        ".TH D 3",
        "=head1 NAME",
        "A page of the kernel.",
        "Plain notes.",
        "The text of a page.",
        "title: a binding",
    ]


def test_manuals_that_are_there_are_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "manuals.jsonl.zst").write_bytes(b"as it is")
    assert build_manuals(tmp_path).read_bytes() == b"as it is"
