"""Plants every fault of `tests/verification/mutations.py`, lets `verify` look for each, and writes the table
`docs/tables/mutations.md`.

    python docs/mutations.py

takes about five minutes on two cores.
"""

import sys
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ranks import RankPool  # noqa: E402 - the tests are no package
from tests.verification.mutations import MUTATIONS, row_of, verify_with  # noqa: E402

PAGE = ROOT / "docs" / "tables" / "mutations.md"

HEAD = """# Planted faults, and what `verify` says

Written by `python docs/mutations.py`; the tests check every line. They plant faults that happened in respected
codebases, one at a time, in a two-layer GPT-2 or, if GPT-2 has no such code, in a model made of Crosscut's layers.
*Named* is the first module that differs in float64, and the micro-batch if it is not the first; *says* has the words of
the report.

"""


def main() -> None:
    pool = RankPool(4)
    rows, killed = [], 0
    for index, mutation in enumerate(track(MUTATIONS, "planting faults")):
        answers = pool.run(mutation.layout.world_size, verify_with, index, mutation.layout, mutation.own_module)
        report = answers[0]
        named = report.first.module if report.first else "nothing"
        killed += not report.same and named == mutation.module
        rows.append(row_of(mutation, report))
    pool.close()
    told = f"**{killed} of {len(MUTATIONS)} found, with the right module named.**\n\n"
    table = ["| fault | layout | named | says |", "|---|---|---|---|", *rows]
    PAGE.write_text(HEAD + told + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
