"""Ranks of a run's layout: memory and messages, planned (`plan.json`) and measured (`measurements.jsonl`). The latter
file also has the learning rates of the groups of parameters.

Both files may come from elsewhere. Values of another type than the schema's are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SENT = {
    "planned": "messages",
    "measured": "messages",
    "planned_bytes": "message_bytes",
    "measured_bytes": "message_bytes",
}
"""Keys of the files by the names of the page."""


def told_ranks(plan: Mapping[str, object], measurements: Sequence[Mapping[str, object]]) -> dict[str, object] | None:
    """Return the ranks as the page draws them. None if neither file says anything that fits."""
    last = measurements[-1] if measurements else {}
    if plan.get("layout") not in (None, last.get("layout")):
        last = {}  # a start with another layout has not reached its third step
    planned, measured, stages = _objects(plan.get("ranks")), _objects(last.get("ranks")), _objects(plan.get("stages"))
    if not planned and not measured:
        return None
    ranks = []
    for i in range(max(len(planned), len(measured))):
        rank, found = planned[i] if i < len(planned) else {}, measured[i] if i < len(measured) else {}
        place = rank.get("stage")
        stage = stages[place] if isinstance(place, int) and 0 <= place < len(stages) else {}
        ranks.append(_told(i, rank, stage, found))
    layout = str(plan.get("layout") or last.get("layout") or "")
    return {
        "layout": layout,
        "axes": _numbers(plan.get("axes")),
        "step": last.get("step"),
        "device": last.get("device"),
        "ranks": ranks,
    }


def told_rates(measurements: Sequence[Mapping[str, object]]) -> dict[str, object] | None:
    """Return the learning rates of the groups of parameters at the last measured step. None if they are equal."""
    last = measurements[-1] if measurements else {}
    rates = _numbers(last.get("learning_rates"))
    return {"step": last.get("step"), "rates": rates} if len(set(rates.values())) > 1 else None


def _told(
    i: int, rank: Mapping[str, object], stage: Mapping[str, object], found: Mapping[str, object]
) -> dict[str, object]:
    of = {name: _numbers((stage if "planned" in name else found).get(key)) for name, key in _SENT.items()}
    return {
        "rank": i,
        "places": _numbers(rank.get("places")),
        "planned": _numbers(stage).get("memory_bytes"),
        "measured": _numbers(found).get("memory_bytes"),
        "parts": _numbers(stage.get("memory")),
        "messages": {
            axis: {name: numbers.get(axis) for name, numbers in of.items()}
            for axis in dict.fromkeys(axis for numbers in of.values() for axis in numbers)
        },
    }


def _objects(found: object) -> list[Mapping[str, object]]:
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


def _numbers(found: object) -> dict[str, float]:
    return {name: of for name, of in found.items() if isinstance(of, int | float)} if isinstance(found, Mapping) else {}
