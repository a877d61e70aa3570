"""Packages from PyPI, npm and Debian, downloaded with the client of each registry, and files read from their archives.

The clients only download: no package is installed, and dependencies are left out. To learn the name of a source
package, pip runs the package's build script.
"""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from crosscut.config.errors import DataError

DOWNLOAD_SECONDS = 600


class Archive(Protocol):
    """An archive of a registry, such as that of a `Page`."""

    registry: str
    package: str
    version: str
    archive: str
    """File name, as the registry's client saves it."""


def download(page: Archive, folder: Path) -> Path:
    """Download an archive into `folder`, and return the file.

    Raises `DataError` if the registry's client is not installed, fails, takes longer than `DOWNLOAD_SECONDS`, or saves
    another file than the list names.
    """
    command = _command(page, folder)
    wanted = f"{page.package} {page.version} ({page.registry})"
    try:
        process = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS
        )
    except FileNotFoundError as error:
        raise DataError(f"`{command[0]}` must be installed to download {wanted}, but is missing.") from error
    except subprocess.TimeoutExpired as error:
        message = f"The download of {wanted} must end within {DOWNLOAD_SECONDS} s, but did not. Try again."
        raise DataError(message) from error
    archive = folder / page.archive
    if process.returncode != 0 or not archive.is_file():
        lines = [line for line in (process.stderr or process.stdout).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"it has not saved {page.archive}"
        raise DataError(f"{wanted} must be available, but `{command[0]}` says: {reason}. {_remedy(page)}")
    return archive


def _command(page: Archive, folder: Path) -> list[str]:
    if page.registry == "npm":
        return ["npm", "pack", "--silent", f"{page.package}@{page.version}"]
    if page.registry == "debian":
        return ["apt-get", "download", "--quiet", f"{page.package}={page.version}"]
    form = "--only-binary" if page.archive.endswith(".whl") else "--no-binary"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    return [*pip, form, page.package, "--dest", str(folder), f"{page.package}=={page.version}"]


def _remedy(page: Archive) -> str:
    if page.registry == "debian":
        return "Run this on Debian 12, after `apt-get update`."
    return f"Check that this machine reaches {page.registry}, and that the registry still has this version."


def read_members(archive: Path, paths: Collection[str]) -> dict[str, bytes]:
    """Return the bytes of these files of an archive (.whl, .tgz, .tar.gz or .deb), without those that it lacks."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as whole:
            return {path: whole.read(path) for path in paths if path in whole.namelist()}
    if archive.suffix != ".deb":
        with tarfile.open(archive) as whole_tar:
            return _read_tar(whole_tar, paths)
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as stream,
    ):
        return _read_tar(stream, paths)


def _read_tar(archive: tarfile.TarFile, paths: Collection[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for member in archive:
        name = member.name.removeprefix("./")
        if name in paths and (file := archive.extractfile(member)) is not None:
            found[name] = file.read()
    return found
