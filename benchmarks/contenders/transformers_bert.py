"""Hugging Face's BERT, as its own users train it: on masked tokens by a loop of their own, on labelled texts by the
`Trainer`.
"""

import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from benchmarks.contenders.programs import step_of
from benchmarks.contenders.task import Shape, Step, Way


def make_bert(shape: Shape, way: Way) -> Step:
    """Build the step of a BERT without dropout, with its own attention and loss."""
    config = BertConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads,
        intermediate_size=4 * shape.hidden_size, vocab_size=shape.vocab_size,
        max_position_embeddings=shape.sequence_length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa", num_labels=shape.num_classes or 2,
    )  # fmt: skip
    if shape.num_classes:
        return TrainerStep(BertForSequenceClassification(config), shape, way)
    model = BertForMaskedLM(config).train()
    called = torch.compile(model) if way.compiled else model

    def loss(tokens: Any, targets: Any) -> Any:
        return called(input_ids=tokens, labels=targets).loss

    return step_of(model, loss, way)


class TrainerStep:
    """Steps of `transformers.Trainer`, which runs in a thread and waits for each batch."""

    def __init__(self, model: Any, shape: Shape, way: Way) -> None:
        self.orders: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[float | BaseException] = queue.Queue()
        self.folder = tempfile.TemporaryDirectory()
        arguments = Arguments(
            output_dir=self.folder.name, per_device_train_batch_size=shape.batch_size, max_steps=1000, report_to=[],
            learning_rate=1e-4, weight_decay=0.01, warmup_steps=100, optim="adamw_torch_fused", save_strategy="no",
            logging_steps=1, disable_tqdm=True, use_cpu=way.device == "cpu", torch_compile=way.compiled,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Waiting(self.orders), callbacks=[Tell(self.answers)])
        threading.Thread(target=self._train, args=(trainer,), daemon=True).start()

    def _train(self, trainer: Trainer) -> None:
        try:
            trainer.train()
        except BaseException as error:  # told by the next step
            self.answers.put(error)

    def __call__(self, number: int, micro_batches: Sequence[tuple[Any, Any]]) -> Callable[[], float]:
        """Do a step, as `Step` defines it. The trainer reads one batch ahead, so it gets the first batch twice."""
        ((tokens, labels),) = micro_batches
        for _ in range(2 if number == 0 else 1):
            for row, label in zip(tokens, labels, strict=True):
                self.orders.put({"input_ids": row, "labels": label})
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return lambda: answer


class Waiting(IterableDataset[Any]):
    """Examples that somebody else gives, each when it is given."""

    def __init__(self, orders: queue.Queue[Any]) -> None:
        self.orders = orders

    def __iter__(self) -> Any:
        """Wait for each example."""
        while True:
            yield self.orders.get()


class Tell(TrainerCallback):
    """Tells the loss of each step."""

    def __init__(self, answers: queue.Queue[float | BaseException]) -> None:
        self.answers = answers

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Tell the loss that the trainer logs after a step."""
        del arguments, state, control
        if "loss" in logs:
            self.answers.put(float(logs["loss"]))
