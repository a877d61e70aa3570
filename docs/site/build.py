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


def main(arguments: list[str]) -> int:
    """Build the site, and return the exit status."""
    from sphinx.cmd.build import build_main

    folder = Path(arguments[0]) if arguments else ROOT / "build" / "site"
    pages, html = folder / "pages", folder / "html"
    for old in (pages, html):
        shutil.rmtree(old, ignore_errors=True)
    stage = Stage()
    stage.add_all()
    stage.write(pages)
    options = ["-W", "--keep-going", "--quiet", "--fresh-env", "--jobs", "auto", "-c", str(Path(__file__).parent)]
    status = build_main([*options, "-d", str(folder / "doctrees"), str(pages), str(html)])
    print(f"{html / 'index.html'}: {len(list(html.rglob('*.html')))} pages")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
