"""The benchmark of spikes applies the rule to recorded runs, and its planted spikes are found, undone and left out."""

import json

import pytest

from benchmarks import spikes


def test_the_rule_is_applied_to_recorded_metrics(tmp_path, capsys):
    rows = [{"step": 1 + step, "loss": 3 + step % 7 / 50, "gradient_norm": 0.5} for step in range(200)]
    rows[150]["loss"] = 9.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spikes.main(["--replay", str(tmp_path)])
    told = capsys.readouterr().out
    assert "200 steps, 1 alarms; at most loss 2.9" in told


@pytest.mark.slow  # a minute of training
def test_poisoned_gradients_are_left_out_and_the_run_repeats(tmp_path):
    spikes.main(["--kinds", "gradients", "--clean", "0", "--json", str(tmp_path / "told.json")])
    told = json.loads((tmp_path / "told.json").read_text())
    row = told["kinds"]["gradients"]
    assert row["equal"]
    assert [event["spike_step"] for event in row["skip"]["events"]] == [spikes.SPIKE + 1]
    assert row["skip"]["loss"] < 1.01 * row["without"]["loss"]
