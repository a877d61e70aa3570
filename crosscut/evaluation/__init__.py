"""Evaluation of a trained model on any layout: WikiText-103, LAMBADA and a user's own text (docs/evaluation.md)."""

from crosscut.evaluation.evaluate import evaluate, make_tasks
from crosscut.evaluation.lambada import Lambada
from crosscut.evaluation.own_text.text import OwnText
from crosscut.evaluation.perplexity import Score, evaluate_loss
from crosscut.evaluation.scoring import WindowScores, score_windows
from crosscut.evaluation.task import Result, Task
from crosscut.evaluation.token_scores import score_tokens, vocab_parallel_scores
from crosscut.evaluation.wikitext import WikiText103
from crosscut.evaluation.windows import Window, sliding_windows

__all__ = [
    "Lambada",
    "OwnText",
    "Result",
    "Score",
    "Task",
    "WikiText103",
    "Window",
    "WindowScores",
    "evaluate",
    "evaluate_loss",
    "make_tasks",
    "score_tokens",
    "score_windows",
    "sliding_windows",
    "vocab_parallel_scores",
]
