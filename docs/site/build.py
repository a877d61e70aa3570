"""Build the site from `docs/`.

    python docs/site/build.py [FOLDER]

The pages are in FOLDER/html (by default `build/site/html`). Warnings are errors. The build needs the packages of the
extra `dev`, and no network; neither do the pages.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stage import ROOT, Stage

MARK = ".crosscut-site"
"""Name of the file in a folder that says that the build may replace what it made there."""


def main(arguments: list[str]) -> int:
    """Build the site, and return the exit status."""
    from sphinx.cmd.build import build_main

    folder = Path(arguments[0]) if arguments else ROOT / "build" / "site"
    pages, html = folder / "pages", folder / "html"
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        told = f"`{folder}` must be new or empty, or hold an earlier build, but does not. Choose another folder."
        print(told, file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    for old in (path for path in (pages, html) if path.exists()):
        shutil.rmtree(old)
    stage = Stage()
    stage.add_all()
    stage.write(pages)
    options = ["-W", "--keep-going", "--quiet", "--fresh-env", "--jobs", "auto", "-c", str(Path(__file__).parent)]
    status = build_main([*options, "-d", str(folder / "doctrees"), str(pages), str(html)])
    print(f"{html / 'index.html'}: {len(list(html.rglob('*.html')))} pages")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
