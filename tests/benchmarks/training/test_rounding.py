"""Differences that the proof does not allow are reported; tests/benchmarks/test_programs.py measures."""

from benchmarks.training import rounding


def test_what_the_proof_does_not_allow_is_told_and_fails(monkeypatch, capsys):
    rows = [
        {"model": "a", "precision": precision, "outputs": 0.1, "gradients": gradients, "failed": []}
        for precision, gradients in (("float16", 0.2), ("bfloat16", 0.25), ("float8", 0.75))
    ]
    monkeypatch.setattr(rounding, "measure", lambda models, num_seeds: rows)
    assert rounding.main([]) == 0
    rows[2]["failed"] = ["seed 0: rounding of gradients, gradient of b"]
    assert rounding.main([]) == 1
    told = capsys.readouterr().out
    assert "0.1000 / 0.7500" in told
    assert "a, float8, seed 0: rounding of gradients, gradient of b" in told
