"""GLUE's files as they are published, and what is wrong with a file."""

from pathlib import Path

import pytest
from scipy import stats

from crosscut.config import ConfigError, DataError
from crosscut.finetuning.tasks import GLUE, Examples, read_glue, score_glue
from tests.refusals import refusal

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t"
    "sentence1\tsentence2\tlabel1\tgold_label\n"
    '0\t31193\t31193n\tgovernment\t( x )\t( x )\t(ROOT)\t(ROOT)\tHe said "no.\tHe agreed.\tneutral\tcontradiction\n'
    "1\t10\t10e\tfiction\t( x )\t( x )\t(ROOT)\t(ROOT)\tIt rains.\tIt is wet.\tentailment\tentailment\n"
)
QQP = (
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "133273\t213221\t213222\tHow old is it?\tWhat is its age?\t1\n"
    "11\t1\t2\tA question without a second one\n"
    "402555\t536040\t536041\tIs this real?\tWho is this?\t0\n"
)
COLA = "gj04\t1\t\tThe sailors rode the breeze.\ncj99\t0\t*\tAs you eat the most, you want the least.\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows(examples: Examples) -> list[tuple[str, str | None, int | None]]:
    return [(one.text, one.pair, one.label) for one in examples.examples]


def test_mnli(tmp_path: Path) -> None:
    examples = read_glue("mnli", write(tmp_path / "dev_matched.tsv", MNLI))
    assert examples.labels == ("entailment", "neutral", "contradiction")
    assert rows(examples) == [('He said "no.', "He agreed.", 2), ("It rains.", "It is wet.", 0)]


def test_qqp_counts_the_lines_without_a_second_question(tmp_path: Path) -> None:
    examples = read_glue("qqp", write(tmp_path / "train.tsv", QQP))
    assert rows(examples) == [("How old is it?", "What is its age?", 1), ("Is this real?", "Who is this?", 0)]
    assert examples.skipped == 1


def test_cola_has_no_header_but_its_test_file_has(tmp_path: Path) -> None:
    examples = read_glue("cola", write(tmp_path / "train.tsv", COLA))
    assert rows(examples) == [
        ("The sailors rode the breeze.", None, 1),
        ("As you eat the most, you want the least.", None, 0),
    ]
    test = read_glue("cola", write(tmp_path / "test.tsv", "index\tsentence\n0\tBill whistled past the house.\n"))
    assert rows(test) == [("Bill whistled past the house.", None, None)]
    assert refusal(DataError, score_glue, "cola", [1], test) == (
        "A score needs labels, but the file has none. Use a file with labels, such as `dev.tsv`."
    )


STSB = (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane is taking off.\tAn air plane is taking off.\t5.000\n"
    '1\tmain-news\theadlines\t2015\t0024\tnone\tnone\tHe said "no.\tHe agreed.\t3.800\n'
    "2\tmain-forums\tdeft-forum\t2014\t0007\tnone\tnone\tIt rains.\tThe man eats.\t0.25\n"
)


def test_stsb_has_numbers_and_its_test_file_has_none(tmp_path: Path) -> None:
    examples = read_glue("stsb", write(tmp_path / "dev.tsv", STSB))
    assert [(one.text, one.pair, one.number) for one in examples.examples][1] == ('He said "no.', "He agreed.", 3.8)
    assert [one.number for one in examples.examples] == [5.0, 3.8, 0.25]
    assert (examples.labels, {one.label for one in examples.examples}) == ((), {None})
    predicted = [4.5, 1.0, 4.0]
    scores = score_glue("stsb", predicted, examples)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(predicted, [5.0, 3.8, 0.25]).statistic)
    assert scores["spearman"] == pytest.approx(0.5)
    lines = [line.rsplit("\t", 1)[0] for line in STSB.splitlines()]
    test = read_glue("stsb", write(tmp_path / "test.tsv", "\n".join(lines) + "\n"))
    assert [one.is_labelled for one in test.examples] == [False] * 3
    assert message("stsb", write(tmp_path / "bad.tsv", STSB.replace("0.25", "-"))) == (
        f"`score` in `{tmp_path / 'bad.tsv'}` must be a finite number, but is '-' in line 4 (1 such lines). Correct "
        "the file."
    )


def test_windows_line_ends_and_a_byte_order_mark_are_dropped(tmp_path: Path) -> None:
    text = "\ufeffsentence\tlabel\r\na charming journey \t1\r\n"
    assert rows(read_glue("sst-2", write(tmp_path / "dev.tsv", text))) == [("a charming journey ", None, 1)]


def test_official_scores_of_a_task(tmp_path: Path) -> None:
    examples = read_glue("qqp", write(tmp_path / "train.tsv", QQP))
    assert score_glue("qqp", [1, 1], examples) == {"accuracy": 0.5, "f1": pytest.approx(2 / 3)}
    assert set(score_glue("cola", [1, 0], read_glue("cola", write(tmp_path / "c.tsv", COLA)))) == {"matthews"}


@pytest.mark.parametrize(
    ("task", "file", "count", "ones"),
    [
        ("sst-2", "sst2_train.tsv", 67_349, 37_569),
        ("sst-2", "sst2_dev_autoprompt.tsv", 872, 444),
        ("rte", "rte_train.tsv", 2_490, 1_241),
        ("rte", "rte_dev.tsv", 277, 131),
        ("cola", "cola_dev.tsv", 1_043, 721),
        ("qnli", "qnli_dev.tsv", 5_463, 2_761),
    ],
)
def test_published_files_are_read_whole(shared: Path, task: str, file: str, count: int, ones: int) -> None:
    examples = read_glue(task, shared / "data" / "bert-tasks" / file).examples
    assert len(examples) == count
    assert sum(example.label or 0 for example in examples) == ones


def message(task: str, path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_glue(task, path)
    return str(error.value)


def test_unknown_task_is_an_error(tmp_path: Path) -> None:
    assert refusal(ConfigError, read_glue, "sst2", tmp_path) == (
        "A GLUE task must be 'mnli', 'qqp', 'sst-2', 'rte', 'qnli', 'cola' or 'stsb', but is 'sst2'."
    )
    assert list(GLUE) == ["mnli", "qqp", "sst-2", "rte", "qnli", "cola", "stsb"]


def test_missing_columns_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", "index\tsentence\tlabel\n0\tIt rains.\t1\n")
    assert message("rte", path) == (
        f"Line 1 of `{path}` must have the columns `sentence1`, `sentence2`, but has `index`, `sentence`, `label`. "
        "Correct the file, or the names of the columns."
    )
    assert message("rte", write(path, "")).endswith(
        "but has no columns. Correct the file, or the names of the columns."
    )


def test_line_of_another_length_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", "sentence\tlabel\nIt rains.\t1\nIt\tis wet.\t1\n")
    assert message("sst-2", path) == (
        f"Line 3 of `{path}` must have 2 columns (sentence, label), but has 3. Check that this is a file of the task "
        "'sst-2'."
    )


def test_unknown_label_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", MNLI.replace("\tentailment\n", "\t-\n"))
    assert message("mnli", path) == (
        f"`gold_label` in `{path}` must be 'entailment', 'neutral' or 'contradiction', but is '-' in line 3 (1 such "
        "lines). Correct the file, or name all labels."
    )


def test_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "dev.tsv"
    assert message("rte", path) == (
        f"`{path}` must be a readable file, but is not: No such file or directory. Check the path."
    )
    path.write_bytes(b"a\xff")
    assert message("rte", path) == f"`{path}` must be UTF-8, but byte 1 is not. Convert the file to UTF-8."
