"""A run that differs is named; tests/benchmarks/test_programs.py measures."""

from benchmarks.training import parity


def test_what_differs_is_named_and_fails(monkeypatch, capsys):
    assert parity.largest_difference([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert parity.largest_difference([1.0, 2.5], [1.5, 2.0]) == 0.5
    row = {"run": ("layout.tensor=2",), "layout": "tensor 2 x data 1", "difference": float("inf"), "limit": 1e-5}
    monkeypatch.setattr(parity, "measure", lambda options: ([5.0], [row]))
    assert parity.main(["--steps", "1"]) == 1
    assert "differs by inf: layout.tensor=2" in capsys.readouterr().out
    row["difference"] = 1e-6
    assert parity.main(["--steps", "1"]) == 0
