"""Run folders as training writes them, for the tests of the page."""

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = "<img src=x onerror=\"console.error('ran')\"></script><script>console.error('ran')</script>"


def row(step: int, *, seed: int = 0, **more: Any) -> dict[str, Any]:
    loss = 2 + 8 / (step + 9) ** 0.5 + 0.05 * math.sin(step * 12.9 + seed)
    figures = {"step": step, "loss": loss, "gradient_norm": 0.5 + loss / 20, "learning_rate": 1e-3, "seconds": 0.5}
    rates = {"tokens_per_second": 4000.5, "model_flops_per_second": 1.5e10, "utilisation": 0.4}
    return {**figures, **rates, "samples": 8 * step, **more}


def validation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "validation_loss": loss, "validation_perplexity": 9.0, "validation_bits_per_byte": 1.25}


def write_run(folder: Path, steps: int, *, seed: int = 0, total: int | None = None, **config: Any) -> Path:
    """Write the metrics and the config of a run that has done `steps` of `total` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(step, seed=seed) for step in range(1, steps + 1)]
    checked = [validation(step, 2.5 + 8 / (step + 9) ** 0.5) for step in range(0, steps + 1, max(steps // 10, 1))]
    lines = sorted([*rows, *checked], key=lambda one: one["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    settings = {"steps": total or steps, "sequence_length": 256, "seed": seed, **config}
    values = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (folder / "config.toml").write_text(f"[training]\n{values}")
    return folder


def append(folder: Path, *rows: dict[str, Any], name: str = "metrics.jsonl") -> None:
    with (folder / name).open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows))


def write_rich_run(folder: Path, *, device: str = "cuda") -> Path:
    """Write a run with everything that the page shows: two ranks, experts, samples, events."""
    write_run(folder, 60, total=100)
    rank = {"memory_bytes": 3_000_000, "messages": {"tensor": 12}, "message_bytes": {"tensor": 98304}}
    rates = {"embedding": 0.002, "matrix": 0.01, "scalar": 0.001}
    start = {"step": 3, "layout": "tensor 2 x data 1", "device": device}
    measured = {**start, "learning_rates": rates, "ranks": [rank, rank]}
    append(folder, measured, name="measurements.jsonl")
    stage = {"memory_bytes": 2_900_000, "memory": {"weights": 2_000_000, "activations": 900_000}}
    plan = {
        "version": 1,
        "layout": "tensor 2 x data 1",
        "axes": {"tensor": 2},
        "ranks": [{"rank": n, "places": {"tensor": n}, "stage": 0} for n in range(2)],
        "stages": [{**stage, "messages": {"tensor": 12}, "message_bytes": {"tensor": 98304}}],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    loads = [[90 + step, 110 - step, 100, 100] for step in range(20)]
    experts = [{"step": i + 1, "loads": {"0.mlp": one}, "entropy": {"0.mlp": 1.3}} for i, one in enumerate(loads)]
    append(folder, *experts, name="experts.jsonl")
    append(folder, {"step": 50, "prompt": "Once", "text": "Once there was"}, name="samples.jsonl")
    append(folder, {"step": 60, "prompt": HOSTILE, "text": f"{HOSTILE} and more"}, name="samples.jsonl")
    append(folder, {"step": 41, "hang_seconds": 30.0, "hang_rank": 1}, row(61))
    return folder
