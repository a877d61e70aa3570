"""Published models for tasks in and out, and layers that get another head."""

import json
import shutil
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from crosscut.checkpoint import Progress, save_checkpoint
from crosscut.config import ConfigError, Layout, ModelConfig, load_run
from crosscut.launch import process_group
from crosscut.model import GPT, Batch, initialize
from crosscut.parallel import RandomStreams, make_mesh, make_reducer, shard_model
from crosscut.pretrained import (
    ModelSource,
    export_checkpoint,
    export_model,
    find_model,
    keep_labels,
    load_trunk,
)
from crosscut.pretrained.export import _published
from crosscut.pretrained.families import published_shapes
from crosscut.pretrained.trunk import notice_of_classes, rows_of_classes
from crosscut.training import run_training
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from tests.pretrained import jobs
from tests.pretrained.encoders import PADDING
from tests.pretrained.tasks import MODELS, NUM_CHOICES, batch_for, make_model, theirs

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=3, sequence_parallel=True),
    Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model for a task. Not to be changed: copy it."""

    @cache
    def of(architecture: str, **changes: Any) -> Path:
        return make_model(tmp_path_factory.mktemp("tasks") / "model", architecture, **changes)

    return of


def step(source: ModelSource, architecture: str, layout: Layout) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """On a rank: the mean loss, the logits, and the gradients under their published names. Every data rank has the
    whole batch.
    """
    model, batch = jobs.load(source, layout, "float64"), batch_for(architecture)
    reducer = make_reducer(model, model.mesh)
    reducer.arm()
    loss = model.loss(batch, {"task": 1 / (int(batch.num_targets) * layout.data)})
    loss.backward()
    reducer.finish()
    gradients = {
        name: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad.full_tensor()
        for name, p in model.named_parameters()
    }
    with torch.no_grad():
        num_choices = NUM_CHOICES if source.model.head == "choice" else 1
        logits = model.task_logits(batch, num_choices=num_choices)
    shapes = published_shapes(source.model)
    named = dict(zip(shapes, _published(source.model, gradients.__getitem__), strict=True))
    return loss.detach() * layout.data, logits, named


@pytest.mark.one_in(11)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("architecture", MODELS)
def test_losses_logits_and_gradients_are_those_of_transformers(ranks, folder, architecture, layout):
    place = folder(architecture)
    source = find_model(place)
    assert (source.model.head, source.left_out) == (MODELS[architecture][0], ())
    loss, logits, gradients = theirs(place, architecture)
    close = 1e-9 if source.model.norm == "layer" else 1e-5  # RMS norms of `transformers` compute in float32
    for our_loss, our_logits, named in ranks.run(layout.world_size, step, source, architecture, layout):
        assert abs(our_loss - loss) <= close * abs(loss)
        torch.testing.assert_close(our_logits, logits, rtol=close, atol=close)
        for name, gradient in _as_ours(gradients, architecture).items():
            own = named[name].clone()
            if name.endswith(("word_embeddings.weight", "embed_tokens.weight")):
                own[PADDING] = 0.0  # `transformers` never trains the embedding of padding
            margin = max(close * float(gradient.abs().max()), 1e-12)
            # RoBERTa's first positions belong to no token, and Crosscut leaves them out.
            torch.testing.assert_close(own, gradient[-len(own) :], rtol=close, atol=margin, msg=name)


def _as_ours(gradients: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Gradients of a RoBERTa under the names of BERT."""
    if "Roberta" not in architecture:
        return gradients
    names = {"roberta.": "bert.", "classifier.dense.": "bert.pooler.dense.", "classifier.out_proj.": "classifier."}
    renamed = {}
    for name, gradient in gradients.items():
        start = next((start for start in names if name.startswith(start)), "")
        renamed[names.get(start, "") + name.removeprefix(start)] = gradient
    return renamed


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("BertForSequenceClassification", Layout(tensor=2)),
        ("BertForQuestionAnswering", Layout(tensor=2, sequence_parallel=True)),
        ("BertForMultipleChoice", Layout(data=2, sharding="zero3")),
        ("GPT2ForSequenceClassification", Layout(tensor=2)),
        ("GPT2ForQuestionAnswering", Layout()),
        ("LlamaForSequenceClassification", Layout()),
        ("LlamaForSequenceClassification, number", Layout()),
        ("BertForSequenceClassification, number", Layout(tensor=2)),
    ],
    ids=str,
)
def test_model_that_came_in_goes_out(ranks, folder, tmp_path, architecture, layout):
    place, out = folder(architecture), tmp_path / "out"
    source = find_model(place)
    ranks.run(layout.world_size, export, source, layout, out)
    before, after = (load_file(each / "model.safetensors") for each in (place, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = find_model(out)
    assert (again.model, again.labels) == (source.model, source.labels)
    assert ModelSource.from_json(json.loads(json.dumps(again.to_json()))) == again
    if architecture == "BertForSequenceClassification":
        assert again.labels == ("no", "perhaps", "yes")
    told = json.loads((out / "config.json").read_text())
    assert told["architectures"] == [architecture.partition(",")[0]]
    assert (told.get("problem_type") == "regression") == (source.model.head == "number")
    if (
        source.model.head not in ("classes", "number") or not source.model.is_causal
    ):  # the tokenizer has no padding for several texts
        assert torch.equal(theirs(out, architecture)[1], theirs(place, architecture)[1])


def export(source: ModelSource, layout: Layout, out: Path) -> None:
    export_model(jobs.load(source, layout, "float32"), out, tokenizer=source.tokenizer, labels=source.labels)


NEW = ("task.classifier.bias", "task.classifier.weight")
POOLER = ("task.pooler.bias", "task.pooler.weight")


def loaded(source: ModelSource, config: ModelConfig, layout: Layout) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """On a rank: the names of the new parameters, and the change of every parameter from its initial value."""
    mesh = make_mesh(layout, jobs.CPU)
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, seed=0))
    shard_model(model, mesh, units=model.blocks, always_used=True)
    initialize(model, seed=4)
    before = {name: parameter.detach().full_tensor().clone() for name, parameter in model.named_parameters()}
    new = load_trunk(model, source)
    return new, {name: p.detach().full_tensor() - before[name] for name, p in model.named_parameters()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, data=2, sharding="zero3")], ids=str)
@pytest.mark.parametrize(
    ("architecture", "changes", "head", "new"),
    [
        ("BertModel", {}, {"head": "classes", "num_classes": 2}, NEW),
        ("BertForPreTraining", {}, {"head": "choice"}, NEW),
        ("BertForPreTraining", {}, {"head": "spans"}, NEW),
        ("BertForMaskedLM", {}, {"head": "classes", "num_classes": 2}, (*NEW, *POOLER)),
        ("BertForSequenceClassification", {}, {"head": "classes", "num_classes": 2}, NEW),
        ("BertForSequenceClassification", {}, {"head": "classes", "num_classes": 3}, NEW),  # no names are given
        ("RobertaForSequenceClassification", {}, {"head": "choice"}, NEW),
        ("BertForQuestionAnswering", {}, {"head": "classes", "num_classes": 2}, (*NEW, *POOLER)),
        ("LlamaForSequenceClassification", {}, {"head": "spans"}, NEW),
    ],
    ids=str,
)
def test_layers_get_another_head(ranks, folder, architecture, changes, head, new, layout):
    source = find_model(folder(architecture, **changes))
    config = source.model.with_head(**head)
    for names, changed in ranks.run(layout.world_size, loaded, source, config, layout):
        assert sorted(names) == sorted(new)
        for name, change in changed.items():
            assert bool(change.abs().sum() == 0) == (name in new), name


def test_pooler_of_another_head_is_read(ranks, folder):
    source = find_model(folder("BertForPreTraining"))
    stored = load_file(folder("BertForPreTraining") / "model.safetensors")["bert.pooler.dense.bias"]
    ((_, changed),) = ranks.run(1, loaded, source, source.model.with_head("choice"), Layout())
    assert torch.equal(changed["task.pooler.bias"], stored)  # a new bias is zero


@pytest.fixture(scope="module")
def run_of_bert(tmp_path_factory) -> Path:
    """The folder of a run of a BERT with both heads."""
    root = tmp_path_factory.mktemp("masked")
    text = root / "foxes.jsonl"
    text.write_text('{"text": "The quick brown fox jumps over the lazy dog. It does so again."}\n' * 60)
    table = {
        "model": {
            "num_layers": 1, "hidden_size": 32, "num_heads": 4, "max_sequence_length": 16, "token_types": 2,
            "attention": "bidirectional", "norm_place": "after", "layers": ("attention gelu_exact",),
            "head": "masked_tokens",
            "sentence_order": True,
        },
        "data": {"text": [str(text)], "objective": "masked", "num_shards": 1, "vocab_size": 300},
        "training": {"steps": 1, "batch_size": 2, "sequence_length": 16, "validation_sequences": 2},
        "optimizer": {"warmup_steps": 0},
        "output": {"folder": str(root / "run"), "sample_tokens": 0},
    }  # fmt: skip
    run_training(load_run(table))
    return root / "run"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence_parallel=True), Layout()], ids=str)
def test_a_run_gives_its_layers_and_its_pooler(ranks, run_of_bert, layout):
    source = find_model(run_of_bert)
    config = source.model.with_head("classes", num_classes=3)
    for names, changed in ranks.run(layout.world_size, loaded, source, config, layout):
        assert sorted(names) == sorted(NEW)
        assert all(bool(change.abs().sum() == 0) == (name in NEW) for name, change in changed.items())


@pytest.fixture(scope="module")
def run_of_classes(run_of_bert, tmp_path_factory) -> Path:
    """The folder of a run with a checkpoint of a model for classes, on the layers of the other run."""
    root = tmp_path_factory.mktemp("classes") / "run"
    shutil.copytree(run_of_bert, root, ignore=shutil.ignore_patterns("checkpoints"))
    run = load_run(root / "config.toml", [f"output.folder={root}"])
    run = replace(run, model=find_model(run_of_bert).model.with_head("classes", num_classes=2))
    with process_group(jobs.CPU):
        mesh = make_mesh(run.layout, jobs.CPU)
        trainer = Trainer(resolve_on(run, jobs.CPU), mesh)
        assert sorted(load_trunk(trainer.model, find_model(run_of_bert))) == sorted(NEW)
        tokens = torch.arange(8).view(2, 4)
        trainer.step(0, [Batch(tokens=tokens, labels=torch.tensor([1, 0]), mask=tokens >= 0)]).wait()
        progress = Progress(step=1, samples=2, layout="tensor 1 x data 1", config=asdict(run))
        state = {"model": trainer.model, "optimizer": trainer.optimizer}
        save_checkpoint(root / "checkpoints", progress, is_first_rank=True, keep=1, **state)
    keep_labels(root, ["no", "yes"])
    return root


def test_a_run_for_classes_is_found_and_exported_with_its_labels(run_of_classes, tmp_path):
    from transformers import BertForSequenceClassification

    source = find_model(run_of_classes)
    assert (source.model.head, source.labels) == ("classes", ("no", "yes"))
    export_checkpoint(source, tmp_path / "out")
    again = find_model(tmp_path / "out")
    assert (again.model, again.labels) == (source.model, source.labels)
    theirs, told = BertForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert theirs.config.id2label == {0: "no", 1: "yes"}


def order(source: ModelSource, layout: Layout, labels: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """On a rank: the names of the new parameters, and the parameters of the classifier."""
    mesh = make_mesh(layout, jobs.CPU)
    model = GPT(source.model, mesh=mesh, streams=RandomStreams(mesh, seed=0))
    shard_model(model, mesh, units=model.blocks, always_used=True)
    initialize(model, seed=4)
    new = load_trunk(model, source, labels)
    parameters = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return new, {name: value for name, value in parameters.items() if name.startswith("task.classifier.")}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
def test_rows_of_a_classifier_are_put_into_the_order_of_the_names(ranks, tmp_path, architecture, layout):
    place = make_model(tmp_path / "model", architecture, id2label={0: "no", 1: "perhaps", 2: "YES"})
    name = "classifier" if "Bert" in architecture else "score"
    stored = load_file(place / "model.safetensors")
    for new, found in ranks.run(layout.world_size, order, find_model(place), layout, ("yes", "no", "perhaps")):
        assert new == ()
        for parameter, value in found.items():
            kind = parameter.rpartition(".")[2]
            assert torch.equal(value, stored[f"{name}.{kind}"][[2, 0, 1]])


def test_rows_of_a_run_are_put_into_the_order_of_the_names(ranks, run_of_classes):
    source = find_model(run_of_classes)
    ((_, as_they_are),) = ranks.run(1, order, source, Layout(), ("no", "yes"))
    for new, found in ranks.run(2, order, source, Layout(data=2, sharding="zero3"), ("yes", "no")):
        assert new == ()
        assert all(torch.equal(value, as_they_are[name].flip(0)) for name, value in found.items())
    ((new, _),) = ranks.run(1, order, source, Layout(), ("no", "maybe"))
    assert sorted(new) == sorted(NEW)


@pytest.mark.parametrize(
    ("theirs", "ours", "rows", "told"),
    [
        (("a", "b", "c"), ("a", "b", "c"), (0, 1, 2), ""),
        (("a", "b", "c"), ("c", "a", "b"), (2, 0, 1), "is kept, with its classes in another order: 'c', 'a', 'b'."),
        (("A", "b"), ("B", "a"), (1, 0), "is kept, with its classes in another order: 'B', 'a'."),
        (("LABEL_0", "LABEL_1"), ("0", "1"), None, "are 'LABEL_0', 'LABEL_1', but must be '0', '1'."),
        (("a", "a"), ("a", "b"), None, "are 'a', 'a', but must be 'a', 'b'."),
        (("a", "A"), ("a", "b"), None, "are 'a', 'A', but must be 'a', 'b'."),
        (("A", "a"), ("A", "a"), (0, 1), ""),
        (("A", "a"), ("a", "A"), (1, 0), "is kept, with its classes in another order: 'a', 'A'."),
        ((), ("a", "b"), None, "are unknown, but must be 'a', 'b'."),
        (("b", "c", "a"), ("a", "b"), None, "but must be 'a', 'b'. To keep the classifier, pass --labels b,c,a."),
        (("B", "C", "A"), ("a", "b"), None, "but must be 'a', 'b'. To keep the classifier, pass --labels b,C,a."),
        (("b", "so so"), ("b",), None, "but must be 'b'. To keep the classifier, pass --labels 'b,so so'."),
        (("b", "c,d", "a"), ("a", "b"), None, "are 'b', 'c,d', 'a', but must be 'a', 'b'."),
        (("A", "a", "b"), ("a", "B"), None, "are 'A', 'a', 'b', but must be 'a', 'B'."),
        (("a", "b"), ("a", "b", "c"), None, "are 'a', 'b', but must be 'a', 'b', 'c'."),
    ],
)
def test_names_of_classes_decide_about_a_classifier(folder, theirs, ours, rows, told):
    source = replace(find_model(folder("BertForSequenceClassification")), labels=theirs)
    assert rows_of_classes(source, ours) == rows
    notice = notice_of_classes(source, ours, may_name=True)
    assert notice.endswith(told)
    assert bool(notice) == bool(told)
    assert notice_of_classes(source, ours) == notice.partition(" To keep the classifier, pass")[0]
    other = find_model(folder("BertForQuestionAnswering"))
    assert (rows_of_classes(other, ours), notice_of_classes(other, ours)) == (None, "")
    assert rows_of_classes(replace(source, labels=()), ()) is None


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_classifier_of_another_kind_is_not_taken_for_classes(ranks, folder, kind):
    place = folder("BertForSequenceClassification", problem_type=kind)
    source = find_model(place)
    assert (source.model.head, source.labels) == ("next_token", ())
    config = source.model.with_head("classes", num_classes=3)
    ((new, _),) = ranks.run(1, loaded, source, config, Layout())
    assert sorted(new) == sorted(NEW)


def test_labels_of_another_number_of_classes_are_refused(run_of_classes):
    keep_labels(run_of_classes, ["no", "perhaps", "yes"])
    with pytest.raises(ConfigError, match=r"labels.json` must hold a JSON list of 2 different names, one for"):
        find_model(run_of_classes)
    keep_labels(run_of_classes, ["no", "yes"])


def test_a_model_for_a_task_predicts_no_next_token(folder):
    place = folder("GPT2ForSequenceClassification")
    with pytest.raises(ConfigError, match=r"^`.*` must hold a model that predicts the next token, but holds a"):
        find_model(place).require_decoder(place)
    with pytest.raises(ConfigError, match=r"^`.*` must hold an encoder, but holds a model for a task \(`model.head`"):
        find_model(place).require_encoder(place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_layers": 3},
            r"^`model.num_layers` must be 2 to load the layers of `.*`, but is 3\. Use the settings of the model in",
        ),
        ({"norm_epsilon": 1e-3}, r"^`model.norm_epsilon` must be 1e-12 to load the layers of `.*`, but is 0.001\."),
    ],
)
def test_other_layers_are_refused(ranks, folder, change, message):
    source = find_model(folder("BertModel"))
    config = ModelConfig(**{**vars(source.model.with_head("spans")), **change})
    with pytest.raises(ConfigError, match=message):
        ranks.run(1, loaded, source, config, Layout())
