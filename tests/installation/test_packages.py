"""What the wheel and the sdist hold, and their version."""

import re
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message

import crosscut
from tests.installation.conftest import ROOT, Packages, tracked

LICENSES = {
    "LICENSE",
    "crosscut/data/corpora/NOTICE",
    "crosscut/data/corpora/CC0-1.0.txt",
    "crosscut/watch/page/vendor/LICENSE.txt",
}


def metadata(packages: Packages) -> tuple[str, Message]:
    """Name of the folder of metadata in the wheel, and the metadata."""
    with zipfile.ZipFile(packages.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return name.removesuffix("METADATA"), message_from_bytes(wheel.read(name))


def test_the_wheel_has_the_tracked_files_of_the_package_and_no_others(packages: Packages) -> None:
    folder, told = metadata(packages)
    with zipfile.ZipFile(packages.wheel) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
    assert sorted(name for name in names if not name.startswith(folder)) == sorted(tracked("crosscut"))
    licenses = {name.removeprefix(f"{folder}licenses/") for name in names if name.startswith(f"{folder}licenses/")}
    assert licenses == LICENSES
    assert set(told.get_all("License-File", [])) == LICENSES
    assert told["License-Expression"] == "Apache-2.0"


def test_the_sdist_has_the_package_and_what_builds_it(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    made = {name for name in names if name.startswith("crosscut.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    front = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert names - made == set(tracked("crosscut")) | front


def test_package_and_changelog_have_one_version(packages: Packages) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert releases == sorted(releases, key=lambda release: release[1], reverse=True)
    assert releases[0][0] == crosscut.__version__ == metadata(packages)[1]["Version"]
    assert packages.sdist.name == f"crosscut-{crosscut.__version__}.tar.gz"
