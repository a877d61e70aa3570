"""Measures what a rank holds under each kind of sharding, and writes the table of `docs/sharding.md`.

    python docs/sharding.py

takes some forty seconds on two cores.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ranks import RankPool  # noqa: E402 - the tests are no package
from tests.training.held import table  # noqa: E402

PAGE = ROOT / "docs" / "sharding.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    """Put the table into the page."""
    pool = RankPool(4)
    measured = table(pool)
    pool.close()
    PAGE.write_text(TABLE.sub(lambda _: measured, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
