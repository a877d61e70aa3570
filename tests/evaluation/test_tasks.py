"""Windows and figures of the tasks, compared with values computed by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from crosscut.config import ConfigError, DataError, EvaluationConfig
from crosscut.data import Tokenizer
from crosscut.evaluation import Lambada, OwnText, WikiText103, Window, WindowScores, make_tasks
from crosscut.evaluation.lambada import last_word
from tests.evaluation.conftest import Letters


def scores(losses: list[float], hits: list[int] | None = None, last_hits: list[int] | None = None) -> WindowScores:
    zeros = [0] * len(losses)
    return WindowScores(np.array(losses), np.array(hits or zeros), np.array(last_hits or zeros))


def test_wikitext_divides_by_the_words_that_were_there(tmp_path: Path, letters: Letters) -> None:
    file = tmp_path / "wiki.test.tokens"
    file.write_text(" \n A @-@ b , c . \n ")
    task = WikiText103(str(file), letters, start=0, window=4, overlap=2, detokenizer="paper")
    assert task.texts[0].tolist() == [0, *letters.encode("A-b, c .")], "the text comes after the start"
    assert task.windows == [Window(0, 0, 5, 1), Window(0, 2, 7, 5), Window(0, 4, 9, 7)]
    found = task.figures(scores([3.0, 2.0, 1.0]))
    assert found.counts == {"words": 6, "tokens": 8, "bytes": 8, "windows": 3}
    assert found.figures["perplexity"] == pytest.approx(math.exp(6 / 6))
    assert found.figures["perplexity_per_token"] == pytest.approx(math.exp(6 / 8))
    assert found.figures["loss_per_token"] == pytest.approx(6 / 8)
    assert found.figures["bits_per_byte"] == pytest.approx(6 / math.log(2) / len("A-b, c ."))
    assert next(iter(found.figures)) == "perplexity"
    assert task.data[0]["file"] == str(file)
    assert len(task.data[0]["sha256"]) == 64


@pytest.mark.parametrize(
    ("name", "words", "tokens"), [("wiki.test.tokens", 245_566, 270_329), ("wiki.test.raw", 245_570, 272_043)]
)
def test_wikitexts_counts(shared: Path, gpt2: Tokenizer, name: str, words: int, tokens: int) -> None:
    """The paper's T_o and T; the raw form has the words that the other one has as <unk>, four of them of two words."""
    file = shared / "data" / "wikitext-103" / name
    task = WikiText103(str(file), gpt2, start=gpt2.end_of_text, window=1024, overlap=32, detokenizer="paper")
    assert sum(window.num_targets for window in task.windows) == tokens
    found = task.figures(scores([0.0] * len(task.windows)))
    assert (found.counts["words"], found.counts["tokens"]) == (words, tokens)


def test_another_file_is_not_taken_for_wikitext(tmp_path: Path, letters: Letters) -> None:
    file = tmp_path / "book.txt"
    file.write_text("Call me Ishmael.")
    with pytest.raises(DataError, match=r"^`evaluation.wikitext103` must be a file of WikiText-103, but .* does not"):
        WikiText103(str(file), letters, start=0, window=4, overlap=2, detokenizer="paper")


def lambada(
    tmp_path: Path, letters: Letters, *passages: str, window: int = 64, before: tuple[int, ...] = ()
) -> Lambada:
    file = tmp_path / "lambada_test.jsonl"
    file.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    return Lambada(str(file), letters, window=window, before=before)


def test_a_passage_is_right_where_all_tokens_of_its_last_word_are(tmp_path: Path, letters: Letters) -> None:
    task = lambada(tmp_path, letters, "I am so", "he is", "do it")
    assert [text.tolist() for text in task.texts] == [letters.encode(t) for t in ("I am so", "he is", "do it")]
    assert task.windows == [Window(0, 0, 7, 4), Window(1, 0, 5, 2), Window(2, 0, 5, 2)]
    assert [window.num_targets for window in task.windows] == [3, 3, 3]  # the blank is the last word's first letter
    found = task.figures(scores([1.0, 2.0, 4.0], hits=[3, 2, 1], last_hits=[1, 1, 0]))
    assert found.figures == {
        "accuracy": 1 / 3,
        "last_token_accuracy": 2 / 3,
        "perplexity": pytest.approx(math.exp(7 / 3)),
    }
    assert found.counts == {"passages": 3, "tokens": 17, "passages_of_one_last_token": 0, "passages_cut": 0}


def test_a_long_passage_loses_its_beginning(tmp_path: Path, letters: Letters) -> None:
    task = lambada(tmp_path, letters, "I am so", window=4)
    assert task.windows == [Window(0, 2, 7, 4)]
    assert task.figures(scores([0.0])).counts["passages_cut"] == 1
    with pytest.raises(
        ConfigError, match=r"must be long enough for the last word of .* but is 2, and one last word has 3 tokens\. Set"
    ):
        lambada(tmp_path, letters, "I am so", window=2)


def test_what_a_model_expects_before_a_text_is_there(tmp_path: Path, letters: Letters) -> None:
    task = lambada(tmp_path, letters, "he is", before=(256,))
    assert task.texts[0].tolist() == [256, *letters.encode("he is")]
    assert task.windows == [Window(0, 0, 6, 3)]
    assert task.figures(scores([0.0])).counts["tokens"] == 5


def test_plain_lines_are_passages_too(tmp_path: Path, letters: Letters) -> None:
    file = tmp_path / "lambada.txt"
    file.write_text("I am so\n\nhe is \n")
    assert [text.size for text in Lambada(str(file), letters, window=64).texts] == [7, 5]


@pytest.mark.parametrize(
    ("within", "suffix"),
    [("\u2028", "jsonl"), ("\x85", "jsonl"), ("\u2028", "txt"), ("\x85", "txt"), ("\x0b", "txt")],
)
def test_only_line_ends_part_passages(tmp_path: Path, letters: Letters, within: str, suffix: str) -> None:
    passages = [f"I{within}am so", "he is"]
    records = [json.dumps({"text": passage}, ensure_ascii=False) for passage in passages]
    file = tmp_path / f"lambada.{suffix}"
    file.write_bytes("\r\n".join(records if suffix == "jsonl" else passages).encode())
    task = Lambada(str(file), letters, window=64)
    assert [text.tolist() for text in task.texts] == [letters.encode(passage) for passage in passages]


NO_TEXT = r"must hold a JSON object with a string under the key `text` on every line, but `.*` does not"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "word"}', r"must hold passages of several words, but passage 1 of `.*` is 'word'"),
        ('{"txt": "a b"}', NO_TEXT),
        ('{"text": 7}', NO_TEXT),
        ('{"text": "a \\ud800"}', NO_TEXT),
        ('{"text": "a b", "n": %s}' % ("9" * 10_000), NO_TEXT),
        ("[" * 100_000, NO_TEXT),
        ("a b", NO_TEXT),
        ("\n", r"must hold passages, but `.*` is empty"),
        (b"\xff", r"must be UTF-8 text, but byte 0 of `.*` is not\. Convert the file to UTF-8\.$"),
        (None, r"must be a readable file, but `.*` is not: No such file"),
    ],
)
def test_a_file_that_is_not_lambada_is_told(tmp_path: Path, letters: Letters, content, message: str) -> None:
    file = tmp_path / "lambada.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=rf"^`evaluation.lambada` {message}"):
        Lambada(str(file), letters, window=64)


def test_lambadas_counts(shared: Path, gpt2: Tokenizer) -> None:
    task = Lambada(str(shared / "data" / "lambada" / "lambada_test.jsonl"), gpt2, window=1024)
    counts = task.figures(scores([0.0] * 5153)).counts
    assert counts == {
        "passages": 5153,
        "tokens": 430_230,
        "passages_of_one_last_token": 4010,
        "passages_cut": 0,
    }


class Pairs(Letters):
    """Takes two letters together where the first is a blank or an `x`: tokens may cross a word's border."""

    def encode(self, text: str) -> list[int]:
        ids, i = [], 0
        while i < len(text):
            size = 2 if text[i] in "x" and i + 1 < len(text) else 1
            ids.append(sum(map(ord, text[i : i + size])))
            i += size
        return ids


def test_a_token_that_reaches_into_the_last_word_is_part_of_it() -> None:
    ids, first = last_word("a bx c", Pairs())
    assert ids == [97, 32, 98, 120 + 32, 99]
    assert first == 3, "the token of `x` and the blank is predicted as well"


def test_text_is_scored_per_token_byte_and_document(tmp_path: Path, letters: Letters) -> None:
    (tmp_path / "a.txt").write_text("añ")
    (tmp_path / "b.jsonl").write_text('{"text": "hello"}\n{"text": "you"}\n')
    task = OwnText([str(tmp_path)], letters, start=0, window=2, overlap=2, text_key="text")
    assert [text.tolist() for text in task.texts] == [[0, *letters.encode(t)] for t in ("añ", "hello", "you")]
    assert task.windows == [
        Window(0, 0, 3, 1), Window(0, 1, 4, 3),
        Window(1, 0, 3, 1), Window(1, 2, 5, 3), Window(1, 3, 6, 5),
        Window(2, 0, 3, 1), Window(2, 1, 4, 3),
    ]  # fmt: skip
    found = task.figures(scores([1.0, 0.5, 1.0, 1.0, 0.5, 0.0, 3.0]))
    assert found.figures == {
        "perplexity": pytest.approx(math.exp(7 / 11)),
        "bits_per_byte": pytest.approx(7 / 11 / math.log(2)),
        "loss_per_token": pytest.approx(7 / 11),
    }
    assert found.counts == {"documents": 3, "tokens": 11, "bytes": 11, "windows": 7, "documents_blank": 0}
    assert [(d["source"].rpartition("/")[2], d["record"], d["tokens"]) for d in found.documents] == [
        ("a.txt", 1, 3), ("b.jsonl", 1, 5), ("b.jsonl", 2, 3),
    ]  # fmt: skip
    assert [d["loss_per_token"] for d in found.documents] == pytest.approx([0.5, 0.5, 1.0])
    assert [entry["file"].rpartition("/")[2] for entry in task.data] == ["a.txt", "b.jsonl"]


def test_blank_documents_are_left_out_and_counted(tmp_path: Path, letters: Letters) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "you"}\n\n{"text": " \\n"}\n')
    (tmp_path / "b.txt").write_text(" \n" * 20_000)
    (tmp_path / "c.txt").write_text("a" + " \n" * 20_000)
    task = OwnText([str(tmp_path)], letters, start=0, window=64, overlap=64, text_key="text")
    counts = task.figures(scores([0.0] * len(task.windows))).counts
    assert (counts["documents"], counts["documents_blank"]) == (2, 3)
    assert counts["bytes"] == 3 + 40_001, "blanks within a document are scored"


def test_a_book_is_one_document(tmp_path: Path, letters: Letters) -> None:
    """Training cuts a long .txt file into documents; here it is one."""
    book = "\n\n".join(f"Paragraph {i} of a long book." for i in range(2000))
    (tmp_path / "book.txt").write_text(book)
    task = OwnText([str(tmp_path / "book.txt")], letters, start=0, window=1024, overlap=512, text_key="text")
    assert [text.size for text in task.texts] == [len(book) + 1]


def test_text_that_is_not_there_is_told(letters: Letters) -> None:
    with pytest.raises(DataError, match=r"^`evaluation.text` must name existing files, but nothing matches `now"):
        OwnText(["nowhere.txt"], letters, start=0, window=4, overlap=2, text_key="text")


def test_tasks_are_those_of_the_config(tmp_path: Path, letters: Letters) -> None:
    (tmp_path / "wiki").write_text(" a @-@ b \n")
    lines = tmp_path / "lambada.txt"
    lines.write_text("he is\n")
    config = EvaluationConfig(wikitext103=str(tmp_path / "wiki"), lambada=str(lines), text=(str(lines),), overlap=2)
    tasks = make_tasks(config, letters, longest=8, vocab_size=257)
    assert [task.name for task in tasks] == ["wikitext103", "lambada", "text"]
    assert [task.protocol["window"] for task in tasks] == [8, 8, 8]
    assert [task.protocol.get("stride") for task in tasks] == [2, None, 2]
    assert [int(task.texts[0][0]) for task in tasks] == [0, ord("h") + 1, 0]
    begun = make_tasks(config, letters, longest=8, vocab_size=257, begin_of_text=256)
    assert [int(task.texts[0][0]) for task in begun] == [256, 256, 256]
    with pytest.raises(
        ConfigError, match=r"^The tokenizer must have at most as many tokens as the model \(256\), but has 257"
    ):
        make_tasks(config, letters, longest=8, vocab_size=256)


def test_own_text_takes_few_windows_and_the_papers_test_set_the_papers(tmp_path: Path, letters: Letters) -> None:
    """The same 198 letters under both protocols, the 32 tokens of the paper's and half of the window."""
    file = tmp_path / "wiki.txt"
    file.write_text("a @-@ b " + "c " * 95)
    config = EvaluationConfig(wikitext103=str(file), text=(str(file),))
    for longest, papers, own in ((32, 32, 16), (64, 32, 32), (128, 32, 64)):
        wiki, text = make_tasks(config, letters, longest=longest, vocab_size=257)
        assert (wiki.protocol["stride"], text.protocol["stride"]) == (papers, own)
        for task, stride in ((wiki, papers), (text, own)):
            assert {window.num_targets for window in task.windows[1:-1]} <= {stride}
            assert len(task.windows) == 1 + -(-(task.texts[0].size - 1 - longest) // stride)


def test_a_document_is_no_larger_than_can_be_encoded(
    tmp_path: Path, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book.txt").write_text("many words " * 100)
    monkeypatch.setattr("crosscut.evaluation.own_text.text.MOST_CHARACTERS", 1000)
    with pytest.raises(DataError, match=r"must have at most 1,000 characters, but `.*book.txt` \(record 1\) has more"):
        OwnText([str(tmp_path / "book.txt")], letters, start=0, window=64, overlap=64, text_key="text")
