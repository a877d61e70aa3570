import json
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.config import RunConfig
from crosscut.logbook.schema import BY_NAME, RUN_FILES, Form
from tests.ranks import RankPool
from tests.training.jobs import whole_run

EXPERTS = ('model.layers=["attention gelu", "attention experts"]', "model.experts.number=4")


def kinds_in(folder: Path) -> dict[str, set[str]]:
    """Kinds of the rows or objects in each file of a run. Raises `ValueError` for one that no kind has."""
    known = {file.name for file in RUN_FILES} | {".crosscut", "checkpoints"}
    assert {path.name for path in folder.iterdir()} <= known
    found = {}
    for file in RUN_FILES:
        path = folder / file.name
        if file.kinds and path.exists():
            lines = path.read_text().splitlines() if file.form is Form.ROWS else [path.read_text()]
            found[file.name] = {BY_NAME[file.name].require_known(json.loads(line)) for line in lines}
    return found


def test_files_of_a_run_have_the_keys_of_the_schema(ranks: RankPool, run_with: Callable[..., RunConfig], text_file):
    run = run_with(*EXPERTS, "evaluation.every=3", f"evaluation.text={text_file}", "training.idle_expert_steps=1")
    ranks.run(1, whole_run, run)
    assert kinds_in(Path(run.output.folder)) == {
        "metrics.jsonl": {"first row", "step", "validation", "evaluation"},
        "experts.jsonl": {"first row", "step"},
        "summary.json": {"training"},
    }


def test_a_key_that_the_schema_lacks_is_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match="has the keys loss, step"):
        kinds_in(tmp_path)
