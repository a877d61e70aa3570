"""A real model on real texts: the scores that `transformers` gives under the same protocols, at every layout."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import transformers

from crosscut.config import EvaluationConfig, Layout
from crosscut.evaluation import evaluate, make_tasks
from crosscut.evaluation.detokenizers import by_the_paper
from crosscut.parallel import make_mesh
from crosscut.pretrained import find_model
from tests.evaluation.theirs import Theirs
from tests.ranks import RankPool

WINDOW, OVERLAP = 128, 64


@pytest.fixture(scope="module")
def files(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationConfig:
    """The first lines of the real ones: all of them take hours on a CPU."""
    folder = tmp_path_factory.mktemp("texts")
    config = {}
    for task, name, lines in (
        ("wikitext103", "wikitext-103/wiki.test.tokens", 12),
        ("lambada", "lambada/lambada_test.jsonl", 24),
    ):
        whole = (shared / "data" / name).read_text(encoding="utf-8")
        config[task] = str(folder / Path(name).name)
        Path(config[task]).write_text("".join(whole.splitlines(keepends=True)[:lines]), encoding="utf-8")
    return EvaluationConfig(**config, window=WINDOW, overlap=OVERLAP, batch_size=2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path, files: EvaluationConfig) -> dict[str, float]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = Theirs(smollm2, end_of_text=transformers.AutoTokenizer.from_pretrained(smollm2).eos_token_id)
    words = Path(files.wikitext103).read_text(encoding="utf-8")
    loss, _ = model.sliding(by_the_paper(words), WINDOW, OVERLAP)
    passages = [json.loads(line)["text"] for line in Path(files.lambada).read_text(encoding="utf-8").splitlines()]
    last_words = list(model.last_words(passages))
    return {
        "wikitext103 perplexity": math.exp(loss / len(words.strip().split(" "))),
        "lambada accuracy": sum(right for right, _, _ in last_words) / len(passages),
        "lambada last_token_accuracy": sum(last for _, last, _ in last_words) / len(passages),
        "lambada perplexity": math.exp(sum(loss for _, _, loss in last_words) / len(passages)),
    }


def scored(smollm2: Path, files: EvaluationConfig, layout: Layout) -> dict[str, float]:
    source = find_model(smollm2)
    sizes = {"longest": source.model.max_sequence_length, "vocab_size": source.model.vocab_size}
    tasks = make_tasks(files, source.load_tokenizer(), **sizes)
    model = source.load(make_mesh(layout, torch.device("cpu")))
    results = evaluate(model, tasks, batch_size=files.batch_size)
    return {f"{r.task} {name}": value for r in results for name, value in r.found.figures.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tensor", [1, 3])
def test_smollm2_scores_as_transformers_says(
    ranks: RankPool, smollm2: Path, files: EvaluationConfig, theirs: dict[str, float], tensor: int
) -> None:
    """Nine heads and three key-value heads."""
    for figures in ranks.run(tensor, scored, smollm2, files, Layout(tensor=tensor), time_limit=900):
        assert 0.1 < theirs["lambada accuracy"] < 0.9
        for name, value in theirs.items():
            assert figures[name] == pytest.approx(value, rel=1e-4), name
