import pytest

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.evaluation.ranks import Machinery
from crosscut.harness.arguments import ModelArguments
from tests.refusals import refusal

ALL = {"pretrained": "runs/demo", "tensor": 2, "data": 3, "precision": "bfloat16"}


def test_what_lm_eval_hands_to_a_model_is_a_place_and_a_layout():
    options = {"batch_size": "4", "max_batch_size": None, "device": "cpu"}
    on = Machinery(layout=Layout(tensor=2, data=3), device="cpu", precision="bfloat16")
    assert ModelArguments.of(ALL, options) == ModelArguments("runs/demo", on, 4)


@pytest.mark.parametrize("device", [None, "cuda:0"], ids=["simple_evaluate", "command"])
def test_what_is_not_said_is_as_lm_eval_has_it(device):
    nothing = {"batch_size": None, "max_batch_size": None, "device": device}
    assert ModelArguments.of({"pretrained": "runs/demo"}, nothing) == ModelArguments("runs/demo", Machinery(), 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({}, {}, "`--model_args` must name a model, but does not. Try pretrained=runs/demo."),
        (
            {"dtype": "float16"},
            {},
            (
                "`--model_args` may only contain `pretrained`, `tensor`, `data` or `precision`, but has `dtype`. "
                "Remove `dtype`."
            ),
        ),
        (
            {"tensor": "two"},
            {},
            "`tensor` in `--model_args` must be a whole number of ranks above 0, but is 'two'. Try tensor=1.",
        ),
        ({"data": 0}, {}, "`data` in `--model_args` must be a whole number of ranks above 0, but is 0. Try data=1."),
        (
            {"precision": "int8"},
            {},
            "`precision` must be 'float32', 'bfloat16', 'float16' or 'float64', but is 'int8'.",
        ),
        (
            {},
            {"batch_size": "auto"},
            "`--batch_size` must be one whole number above 0, but is auto. Try `--batch_size 8`.",
        ),
        (
            {},
            {"batch_size": 8, "max_batch_size": 64},
            "`--batch_size` must be one whole number above 0, but is 8 with `--max_batch_size 64`.",
        ),
        ({}, {"device": "cuda:1"}, "`--device` must be 'auto', 'cpu' or 'cuda', but is 'cuda:1'."),
    ],
)
def test_a_mistake_is_one_message(arguments, options, message):
    place = {"pretrained": "runs/demo"} if arguments or options else {}
    assert refusal(ConfigError, ModelArguments.of, {**place, **arguments}, options).startswith(message)


def test_as_many_ranks_must_be_started_as_the_layout_has(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    ModelArguments.of(ALL, {}).require_ranks()
    monkeypatch.delenv("RANK")
    with pytest.raises(LayoutError) as error:
        ModelArguments.of(ALL, {}).require_ranks()
    assert str(error.value) == (
        "`layout.tensor` x `layout.data` must be the number of processes (1), but is 2 x 3 = 6. Change the number of "
        "processes to 6, or change the layout. `crosscut lm-eval` starts the processes by itself, but lm-eval's "
        "own command `lm_eval` does not: start `lm_eval` under torchrun."
    )
