"""Conventions about a GPU's attention kernels that several packages share, as a table."""

import pytest

from crosscut.config.conventions import keeps_scores, takes_shared_heads

TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)


@pytest.mark.parametrize(
    ("compute", "capability", "takes"),
    [
        ("bfloat16", AMPERE, True),
        ("float16", AMPERE, True),
        ("bfloat16", BLACKWELL, True),
        ("float16", HOPPER, True),
        ("float16", TURING, False),
        ("bfloat16", TURING, False),
        ("float32", TURING, False),
        ("float32", AMPERE, False),
        ("float32", HOPPER, False),
        ("float64", HOPPER, False),
    ],
)
def test_shared_heads_are_for_two_bytes_from_ampere_on(compute: str, capability: tuple[int, int], takes: bool) -> None:
    assert takes_shared_heads(compute, head_size=128, dropout=0.1, capability=capability) == takes


@pytest.mark.parametrize(
    ("head_size", "dropout", "on_large", "on_small"),
    [
        (192, 0.1, True, True),
        (193, 0.0, True, False),
        (224, 0.0, True, False),
        (256, 0.0, True, True),
        (256, 0.1, True, False),
        (257, 0.0, False, False),
    ],
)
def test_wide_heads_are_shared_where_the_kernel_has_room(
    head_size: int, dropout: float, on_large: bool, on_small: bool
) -> None:
    for capability, takes in {AMPERE: on_large, HOPPER: on_large, ADA: on_small, BLACKWELL: on_small}.items():
        given = {"head_size": head_size, "dropout": dropout, "capability": capability}
        assert takes_shared_heads("bfloat16", **given) == takes, capability


def test_scores_are_kept_in_types_that_no_fused_kernel_takes() -> None:
    kept = {(t, c): keeps_scores(t, capability=c) for t in ("float64", "float32", "float16", "bfloat16")
            for c in (TURING, AMPERE)}  # fmt: skip
    assert {case for case, keeps in kept.items() if keeps} == {
        ("float64", TURING),
        ("float64", AMPERE),
        ("bfloat16", TURING),
    }
