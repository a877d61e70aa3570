"""Training of a BERT on masked tokens: the same batches and losses on every layout and after a resume."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from crosscut.config import CheckpointError, ConfigError, DataError, RunConfig
from crosscut.data import TokenFolder
from crosscut.pretrained import export_checkpoint, find_model
from crosscut.training import batches
from crosscut.training.job import run_training
from crosscut.training.resuming import identity_of
from tests.training.conftest import tiny_run
from tests.training.jobs import parts, rows_of, whole_run
from tests.training.test_resume import require_same_run_here_and_elsewhere

BERT = (
    "model.attention=bidirectional",
    "model.norm_place=after",
    "model.token_types=2",
    "model.layers=attention gelu_exact",
    "model.head=masked_tokens",
    "model.sentence_order=true",
    "data.objective=masked",
    "checkpoint.keep=100",
)


LAYOUT = ("layout.data=2", "layout.sharding=zero3")


@pytest.fixture(scope="module")
def masked_tokens(text_file, tmp_path_factory) -> Path:
    """Token shards of the small corpus with an index of sentences."""
    from crosscut.data import prepare

    folder = tmp_path_factory.mktemp("masked") / "tokens"
    config = tiny_run(folder, Path("unused"), f"data.text={text_file}", "data.objective=masked").data
    prepare(config, folder, seed=1, progress=False)
    return folder


@pytest.fixture
def bert_run(masked_tokens, tmp_path):
    def make(*overrides: str) -> RunConfig:
        return tiny_run(masked_tokens, tmp_path / "run", *BERT, *overrides)

    return make


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packed", [False, True])
def test_another_layout_and_a_resume_train_the_same_model(ranks, bert_run, packed):
    kind = ("data.pairs=false", "model.sentence_order=false", "training.document_mask=true") if packed else ()
    kind = (*kind, "model.dropout=0", "training.steps=5", "training.validate_every=0")
    run = bert_run(*kind)
    require_same_run_here_and_elsewhere(ranks, run, bert_run(*kind, *LAYOUT))


def _fields(run: RunConfig) -> tuple[set[str], set[str]]:
    """On a rank: fields of a micro-batch, and fields that the model reads."""
    _, batches = parts(run)
    return set(batches.micro_batches(0)[0].given()), set(batches.reads)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_has_the_fields_that_the_model_reads(ranks, bert_run, packed):
    kind = ("data.pairs=false", "model.sentence_order=false", "training.document_mask=true") if packed else ()
    ((given, read),) = ranks.run(1, _fields, bert_run(*kind))
    assert given == read
    assert given >= ({"documents", "positions"} if packed else {"order", "segments"})


def _searches(run: RunConfig) -> int:
    """On a rank: the number of times that a whole run looks for its training samples."""
    with mock.patch.object(batches, "masked_samples", wraps=batches.masked_samples) as search:
        whole_run(run)
        return search.call_count


def test_a_rank_reads_the_corpus_once_and_no_resume_changes_the_share_of_masked_words(ranks, bert_run):
    """The process that prepares the run, which is the first rank here, reads the corpus before."""
    assert ranks.run(1, _searches, bert_run("training.steps=3", "training.validate_every=0")) == [2]
    with pytest.raises(CheckpointError, match=r"`data\.mask_fraction` must be 0\.15 as in the checkpoint"):
        run_training(bert_run("training.steps=6", "data.mask_fraction=0.3"), resume=True)


def test_a_whole_run_learns_and_is_told_without_text_and_bits_per_byte(ranks, bert_run, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("The people of the United States were glad . " * 20)
    own = (f"evaluation.text={text}", "evaluation.every=5", "optimizer.learning_rate=2e-3")
    run = bert_run("training.steps=10", "checkpoint.every=10", "training.validate_every=0", *own)
    told = ranks.run(1, whole_run, run)[0]
    summary = json.loads((Path(run.output.folder) / "summary.json").read_text())
    assert summary["validation_loss_after"] < summary["validation_loss_before"] - 0.2
    assert summary["validation_bits_per_byte_after"] is None
    scores = [row["masked_text_loss"] for row in rows_of(run) if "masked_text_loss" in row]
    assert len(scores) == 2
    assert scores[1] < scores[0]
    assert "BERT" in told
    assert "epochs" in told
    assert "generate" in told and "[MASK]" in told
    assert not (Path(run.output.folder) / "sample.txt").exists()
    source = find_model(run.output.folder)
    export_checkpoint(source, tmp_path / "export")
    assert find_model(tmp_path / "export").model == source.model


def test_other_sentences_are_another_run_only_for_pairs(bert_run, masked_tokens, tmp_path):
    other = shutil.copytree(masked_tokens, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["train"][0]["sentences_sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    folders = [TokenFolder.open(folder, verify=False) for folder in (masked_tokens, other)]
    packed = bert_run("data.pairs=false", "model.sentence_order=false")
    for run, keys in ((bert_run(), {"data.sentences"}), (packed, set())):
        one, two = (identity_of(run, folder) for folder in folders)
        assert {key for key in one if one[key] != two[key]} == keys
        assert one.keys() == two.keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.objective=causal",),
            r'^`data\.objective` must be "masked" for a model with `model\.head` = "masked_tokens", but is "causal"\. ',
        ),
        (
            ("model.head=next_token", "model.sentence_order=false"),
            r'^`data\.objective` must be "causal" for a model with `model\.head` = "next_token", but is "masked"\. ',
        ),
        (
            ("model.head=choice", "model.sentence_order=false"),
            r'^`model\.head` must be "next_token" or "masked_tokens" for training on texts, but is "choice"\. Set ',
        ),
        (("data.pairs=false",), r"^`data\.pairs` must be true for a model that predicts the order of segments, but "),
        (("model.token_types=1",), r"^`model\.token_types` must be 0 or at least 2 for pairs of segments, but is 1\. "),
        (
            ("evaluation.wikitext103=wiki.test.tokens",),
            r"^`evaluation\.wikitext103` must be empty for a model that predicts masked tokens, but is `wiki",
        ),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(bert_run, overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_training(bert_run(*overrides))


def test_tokens_without_sentences_are_refused_before_a_rank_starts(bert_run, tokens_folder):
    with pytest.raises(DataError, match=r"must have a token that begins a sequence"):
        run_training(bert_run(f"data.tokens={tokens_folder}"))
