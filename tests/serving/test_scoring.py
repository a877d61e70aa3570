"""Texts that are scored: `echo` and `logprobs` tell the prompt's own probabilities, as of a forward pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai import OpenAI

from crosscut.config import Layout
from crosscut.data import Tokenizer
from crosscut.model import Batch
from crosscut.parallel import make_mesh
from crosscut.pretrained import find_model
from tests.ranks import RankPool
from tests.serving.conftest import NAME, WINDOW, Server

TEXTS = ["Fellow citizens of the Senate, Grüße, 世界!", "We", "the state of the Union " * 12]
PATH = "/v1/completions"


def log_probabilities(folder: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Log probabilities [tokens, V] of the next token after each token of each prompt, from the model's own forward
    pass.
    """
    model = find_model(folder).load(make_mesh(Layout(), torch.device("cpu")))
    with torch.no_grad():
        return [model.logits_of(model(Batch(tokens=torch.tensor([prompt])))[0]).log_softmax(1) for prompt in prompts]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder / "tokenizer.json")


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of 1 to several hundred tokens."""
    prompts = [*map(tokenizer.encode_prompt, TEXTS), [40, 401, 0, 17]]
    assert max(map(len, prompts)) > 64, "more than are scored at once"
    return prompts


@pytest.fixture(scope="module")
def expected(ranks: RankPool, model_folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    return ranks.run(1, log_probabilities, str(model_folder), prompts)[0]


# On two ranks, tests/generation/test_decoder.py compares the same probabilities.
@pytest.fixture(params=["whole", pytest.param("cut", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


def score(server: Server, **fields: object) -> dict[str, Any]:
    status, answer = server.ask(PATH, {"model": NAME, "echo": True, "max_tokens": 0, "logprobs": 3, **fields})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompts_probabilities_are_those_of_a_forward_pass(server, prompts, expected, max_tokens):
    """The token that is written at last may end the text, and is told all the same: clients count on one more."""
    answer = score(server, prompt=prompts, max_tokens=max_tokens, temperature=0, logit_bias={"401": 100})
    assert answer["usage"] == {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": len(prompts) * max_tokens,
        "total_tokens": sum(map(len, prompts)) + len(prompts) * max_tokens,
    }
    for prompt, choice, rows in zip(prompts, answer["choices"], expected, strict=True):
        told = choice["logprobs"]
        assert choice["finish_reason"] == ("stop" if max_tokens else "length")
        assert {len(values) for values in told.values()} == {len(prompt) + max_tokens}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        targets = [*prompt[1:], *[401] * max_tokens]
        for token, row, logprob, likeliest in zip(
            targets, rows, told["token_logprobs"][1:], told["top_logprobs"][1:], strict=max_tokens == 1
        ):
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert max(likeliest.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert (logprob == max(likeliest.values())) == (token == int(row.argmax()))


def test_the_prompt_is_told_token_by_token_with_its_text(whole, prompts):
    for text, prompt in zip(TEXTS, prompts[:3], strict=True):
        (choice,) = score(whole, prompt=text, max_tokens=5, temperature=0)["choices"]
        told = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert told["text_offset"][0] == 0
        ends = [*told["text_offset"][1:], len(choice["text"])]
        pieces = [choice["text"][start:end] for start, end in zip(told["text_offset"], ends, strict=True)]
        assert "".join(pieces[: len(prompt)]) == text
        for token, piece in zip(told["tokens"][: len(prompt)], pieces, strict=False):
            assert token == piece or token.startswith("bytes:")


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_tells_the_same(whole, max_tokens):
    wish = {"prompt": TEXTS[:2], "n": 2, "max_tokens": max_tokens, "seed": 3}
    whole_answer = score(whole, **wish)
    with OpenAI(base_url=f"{whole.url}/v1", api_key="none") as client:
        chunks = client.completions.create(
            model=NAME, echo=True, logprobs=3, **wish, stream=True, stream_options={"include_usage": True}
        )
        streamed: list[dict[str, Any]] = [{"text": "", "tokens": [], "text_offset": []} for _ in range(4)]
        for chunk in chunks:
            for choice in chunk.choices:
                one = streamed[choice.index]
                one["text"] += choice.text
                one["tokens"] += choice.logprobs.tokens
                one["text_offset"] += choice.logprobs.text_offset
                one["finish_reason"] = choice.finish_reason
    assert chunk.usage.model_dump(exclude_none=True) == whole_answer["usage"]
    for one, choice in zip(streamed, whole_answer["choices"], strict=True):
        told = {key: choice["logprobs"][key] for key in ("tokens", "text_offset")}
        assert one == {"text": choice["text"], "finish_reason": choice["finish_reason"], **told}


def test_no_tokens_are_an_answer_without_probabilities_too(whole):
    for echo, text in ((False, ""), (True, "We")):
        (choice,) = score(whole, prompt="We", echo=echo, logprobs=None)["choices"]
        assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    (choice,) = score(whole, prompt="We", echo=False)["choices"]
    assert choice["text"] == ""
    assert set(map(len, choice["logprobs"].values())) == {0}


def test_a_prompt_may_fill_the_window_where_nothing_is_written(whole):
    (choice,) = score(whole, prompt=[40] * WINDOW)["choices"]
    assert len(choice["logprobs"]["tokens"]) == WINDOW


def test_the_written_token_stands_among_the_likeliest(whole):
    """Up to one more than was asked for, as OpenAI has it."""
    (choice,) = score(whole, prompt="We", echo=False, max_tokens=9, logprobs=0, temperature=2.0, seed=1)["choices"]
    told = choice["logprobs"]
    expected = [{token: logprob} for token, logprob in zip(told["tokens"], told["token_logprobs"], strict=True)]
    assert told["top_logprobs"] == expected


@pytest.mark.slow  # lm-eval takes seconds to import
@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what lm-eval imports
def test_lm_eval_asks_and_understands(server, prompts, expected):
    """Its own words and its own reading of the answer; how it sends them is left out."""
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = SimpleNamespace(model=NAME)
    status, answer = server.ask(PATH, LocalCompletionsAPI._create_payload(client, prompts, generate=False))
    assert status == 200, answer
    for num_context in (1, 3):
        kept = [number for number, prompt in enumerate(prompts) if len(prompt) > num_context]
        choices = [answer["choices"][number] | {"index": i} for i, number in enumerate(kept)]
        found = LocalCompletionsAPI.parse_logprobs({"choices": choices}, ctxlens=[num_context] * len(kept))
        for number, (logprob, is_greedy) in zip(kept, found, strict=True):
            targets = torch.tensor(prompts[number][num_context:])
            rows = expected[number][num_context - 1 : -1]
            assert logprob == pytest.approx(float(rows.gather(1, targets.unsqueeze(1)).sum()), rel=1e-4)
            assert is_greedy == bool((rows.argmax(1) == targets).all())


def test_a_special_token_inside_a_prompt_of_ids_is_told_in_its_place(server, tokenizer):
    end = "<|im_end|>"
    first, special, second = (tokenizer.encode_prompt(text) for text in ("Fellow", end, " citizens"))
    prompt = [*first, *special, *second]
    assert len(special) == 1
    choice = score(server, prompt=prompt)["choices"][0]
    assert choice["text"].startswith(f"Fellow{end} citizens")
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    assert choice["text"][offsets[len(first)] : offsets[len(first) + 1]] == end
