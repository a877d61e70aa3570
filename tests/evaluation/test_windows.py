"""The paper's sliding window (section 4.2.1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.config import ConfigError, EvaluationConfig
from crosscut.evaluation import Window, sliding_windows


def test_windows_of_ten_tokens_by_hand() -> None:
    """Ten tokens, four read at once, two further each time: tokens 1 to 9 are targets."""
    assert list(sliding_windows(0, 10, window=4, overlap=2)) == [
        Window(text=0, start=0, stop=5, first=1),  # reads 0 to 3, scores 1, 2, 3, 4
        Window(text=0, start=2, stop=7, first=5),  # reads 2 to 5, scores 5, 6
        Window(text=0, start=4, stop=9, first=7),  # reads 4 to 7, scores 7, 8
        Window(text=0, start=5, stop=10, first=9),  # the last one ends with the text: reads 5 to 8, scores 9
    ]


@pytest.mark.parametrize(
    ("length", "overlap", "windows"),
    [
        (10, 4, [(0, 5, 1), (4, 9, 5), (5, 10, 9)]),
        (5, 1, [(0, 5, 1)]),
        (2, 1, [(0, 2, 1)]),
        (1, 1, []),
    ],
    ids=["nothing shared", "one window", "one target", "no target"],
)
def test_windows_of_other_texts_by_hand(length: int, overlap: int, windows: list[tuple[int, int, int]]) -> None:
    expected = [Window(3, *places) for places in windows]
    assert list(sliding_windows(3, length, window=4, overlap=overlap)) == expected


def test_the_papers_windows_of_its_test_set() -> None:
    """T = 270,329 tokens after one that begins the text: the first window scores 1,024, each other one 32."""
    windows = list(sliding_windows(0, 270_330, window=1024, overlap=32))
    assert len(windows) == 1 + -(-(270_329 - 1024) // 32) == 8417
    assert {window.length for window in windows} == {1024}


@given(length=st.integers(1, 200), window=st.integers(1, 40), data=st.data())
def test_every_target_is_scored_once_with_enough_before_it(length: int, window: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, window))
    windows = list(sliding_windows(0, length, window=window, overlap=overlap))
    assert [t for w in windows for t in range(w.first, w.stop)] == list(range(1, length))
    for w in windows:
        assert 0 <= w.start < w.first < w.stop <= length
        assert w.length <= window
        assert w.length == min(window, length - 1), "each window is as long as it can be"
        assert w.first == 1 or (w.first - w.start > window - overlap and w.num_targets <= overlap)


def test_a_window_that_the_model_cannot_read_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^`evaluation.window` must be at most the model's maximum of 64 tokens, but is 100. Re"
    ):
        EvaluationConfig(window=100).window_for(64)
    assert EvaluationConfig().window_for(64) == 64
    assert EvaluationConfig().window_for(8192) == 1024
    assert EvaluationConfig(window=2048).window_for(8192) == 2048


def test_windows_that_would_leave_targets_out_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^`evaluation.overlap` must be at most the window's 16 tokens, but is 32. Th"
    ):
        EvaluationConfig(text=("a.txt",), overlap=32).window_for(16)
    with pytest.raises(ConfigError, match=r"^`evaluation.overlap` must be at least 0, but is -1"):
        EvaluationConfig(overlap=-1)


@pytest.mark.parametrize(("window", "papers", "own"), [(1024, 32, 512), (33, 32, 16), (16, 16, 8), (1, 1, 1)])
def test_the_paper_advances_by_32_tokens_and_own_text_by_half_a_window(window: int, papers: int, own: int) -> None:
    assert (EvaluationConfig().papers_stride(window), EvaluationConfig().own_stride(window)) == (papers, own)


def test_a_given_stride_is_that_of_both() -> None:
    config = EvaluationConfig(overlap=7)
    assert (config.papers_stride(16), config.own_stride(16)) == (7, 7)


def test_only_tasks_that_slide_need_an_overlap_that_fits() -> None:
    assert EvaluationConfig(lambada="lambada.jsonl", window=2, overlap=32).window_for(64) == 2
    assert EvaluationConfig(lambada="lambada.jsonl").window_for(16) == 16, "as for a run of short sequences"
    with pytest.raises(ConfigError, match=r"^`evaluation.overlap` must be at most the window's 16 tokens"):
        EvaluationConfig(lambada="lambada.jsonl", wikitext103="wiki.test.raw", overlap=32).window_for(16)


def test_an_evaluation_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^`evaluation.every` must be 0 if there is nothing to score, but is 5. N"):
        EvaluationConfig(every=5)
    with pytest.raises(ConfigError, match=r"^`evaluation.detokenizer` must be 'paper' or 'invertible', but is 'moses'"):
        EvaluationConfig(detokenizer="moses")
