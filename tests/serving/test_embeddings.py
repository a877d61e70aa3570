"""`/v1/embeddings`: the official OpenAI client, and hostile requests, against a real server of an encoder."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import get_type_hints

import pytest
import torch
from openai import BadRequestError, OpenAI
from openai.types import embedding_create_params
from torch import Tensor

from crosscut.config import ConfigError, Layout
from crosscut.evaluation.embeddings import embed
from crosscut.evaluation.ranks import Machinery
from crosscut.serving.protocol.embeddings import MOST_INPUTS
from crosscut.serving.server import ServerOptions, serve
from tests.evaluation.sentences import make_trunk, modules_of, theirs, write
from tests.serving.conftest import ENCODER, Server, start
from tests.serving.protocol.test_refusals import DEEP
from tests.serving.test_endurance import posted

PATH = "/v1/embeddings"
TEXTS = ["the quick brown fox", "dog", " jumps over the lazy dog ", "", "[MASK] fox"]
BROKEN = "fox " * 14
"""Text of 16 tokens, whose last position is broken."""


def asked(**fields: object) -> dict[str, object]:
    return {"model": ENCODER, "input": "the fox"} | fields


def ours(folder, texts: list[str]) -> Tensor:
    on = Machinery(layout=Layout(), device="cpu")
    return torch.tensor(embed(str(folder), lambda: texts, on))


def assert_answers(server: Server) -> None:
    status, content = server.ask(PATH, asked())
    assert (status, len(content["data"][0]["embedding"])) == (200, 32), content


@pytest.fixture
def client(encoder: Server):
    with OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_embeddings_are_those_of_the_command(client, encoder, encoder_folder, form):
    """The client itself requests base64 if no format is given, and decodes it."""
    fields = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model=ENCODER, input=TEXTS, **fields)
    assert (answer.object, answer.model) == ("list", ENCODER)
    assert [(one.object, one.index) for one in answer.data] == [("embedding", index) for index in range(len(TEXTS))]
    if form == "base64":
        assert {type(one.embedding) for one in answer.data} == {str}
        return
    found = torch.tensor([one.embedding for one in answer.data])
    torch.testing.assert_close(found, ours(encoder_folder, TEXTS), rtol=0, atol=1e-6)


def test_usage_counts_the_tokens_and_one_text_needs_no_list(client):
    one = client.embeddings.create(model=ENCODER, input="the fox")
    assert one.usage.prompt_tokens == one.usage.total_tokens == 4  # with [CLS] and [SEP]
    assert client.embeddings.create(model=ENCODER, input=["the fox", "dog"]).usage.prompt_tokens == 7


def test_ids_are_embedded_unchanged(client, encoder_folder):
    from tokenizers import Tokenizer as Inner

    ids = Inner.from_file(str(encoder_folder / "tokenizer.json")).encode("the fox").ids
    expected = client.embeddings.create(model=ENCODER, input="the fox").data[0].embedding
    for given in (ids, [ids]):
        (found,) = client.embeddings.create(model=ENCODER, input=given).data
        assert found.embedding == pytest.approx(expected, abs=1e-6)
    (bare,) = client.embeddings.create(model=ENCODER, input=ids[1:-1]).data
    assert bare.embedding != pytest.approx(expected, abs=1e-2)


def test_model_is_listed_as_an_encoder(encoder):
    (model,) = encoder.ask("/v1/models")[1]["data"]
    assert (model["id"], model["embeddings"], model["chat"], model["window"]) == (ENCODER, True, False, 16)


def test_encoder_writes_no_text(encoder, client):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, content = encoder.ask(path, {"model": ENCODER, "prompt": "We"})
        assert (status, content["error"]["code"]) == (400, "no_text")
        assert content["error"]["message"] == (
            f"`{ENCODER}` must predict the next token to write text, but is an encoder. Use /v1/embeddings."
        )
    with pytest.raises(BadRequestError, match="must predict the next token"):
        client.completions.create(model=ENCODER, prompt="We")


def test_decoder_embeds_nothing(whole):
    status, content = whole.ask(PATH, {"model": "tiny-llama", "input": "We"})
    assert (status, content["error"]["code"]) == (400, "no_embeddings")
    assert content["error"]["message"] == (
        "`tiny-llama` must be an encoder to embed texts, but predicts the next token. Use /v1/completions."
    )


INPUTS = "`input` must be a string, a list of token ids, a list of strings, or a list of lists of token ids, but is "
REFUSED: list[tuple[object, str]] = [
    ([1], "The request's body must be a JSON object, but is [1]."),
    ({"input": "fox"}, f"`model` must be the model that is served (`{ENCODER}`), but is missing."),
    ({"model": ENCODER}, f"{INPUTS}missing."),
    (asked(input=[]), "`input` must have at least one text, but is []."),
    (asked(input=[[]]), f"{INPUTS}[[]]."),
    (asked(input=7), f"{INPUTS}7."),
    (asked(input=[1, "fox"]), f'{INPUTS}[1, "fox"].'),
    (asked(input=[1, True]), f"{INPUTS}[1, true]."),
    (asked(input=[1.0]), f"{INPUTS}[1.0]."),
    (asked(input=["fox", None]), f'{INPUTS}["fox", null].'),
    (asked(input={"text": "fox"}), f'{INPUTS}{{"text": "fox"}}.'),
    (asked(input="\ud800"), f'{INPUTS}"\\ud800".'),
    (asked(input=DEEP), f"{INPUTS}[[["),
    (
        asked(input=["a"] * (MOST_INPUTS + 1)),
        f"`input` must hold at most {MOST_INPUTS} texts, but has {MOST_INPUTS + 1}. Send several requests.",
    ),
    (
        asked(input=[[5, 300]]),
        "`input[0]` must hold only token ids from 0 to 299, the ids that the model has, but holds",
    ),
    (asked(input=[5, -1]), "`input` must hold only token ids from 0 to 299, the ids that the model has, but holds the"),
    (
        asked(input=[10**40]),
        "ids that the model has, but holds the id 10000000000000000000000000000000000000000. Remove this id.",
    ),
    (asked(input=[5] * 17), "`input` must have at most 16 tokens, but has 17. Shorten the text, or split it"),
    (asked(input=["fox", "fox " * 15]), "`input[1]` must have at most 16 tokens, but has 17. Shorten the text"),
    (asked(input=["fox", "fox " * 90_000]), "`input[1]` must have at most 96 bytes (16 tokens, times 6 bytes of the"),
    (asked(dimensions=16), "`dimensions` must be omitted or 32, but is 16. The model's embeddings have a fixed number"),
    (asked(dimensions=True), "`dimensions` must be omitted or 32, but is true."),
    (asked(encoding_format="int8"), '`encoding_format` must be float or base64, but is "int8".'),
    (asked(encoding_format=3), "`encoding_format` must be a string, but is 3."),
    (asked(inputs=["fox"]), "`inputs` must be a known field, but is not. Did you mean `input`?"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_malformed_request_is_told_what_is_wrong(encoder, body, message):
    status, content = encoder.ask(PATH, body)
    assert status == 400
    assert message in content["error"]["message"]
    assert content["error"]["type"] == "invalid_request_error"


def test_other_model_is_told_the_served_one(encoder):
    status, content = encoder.ask(PATH, asked(model="other"))
    assert (status, content["error"]["code"], content["error"]["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("fields", [{"dimensions": 32}, {"user": "me"}, {"encoding_format": None, "dimensions": None}])
def test_field_that_asks_for_nothing_is_let_through(encoder, fields):
    assert encoder.ask(PATH, asked(**fields))[0] == 200


def test_every_field_of_the_protocol_is_known(encoder):
    names = [*get_type_hints(embedding_create_params.EmbeddingCreateParams)]
    assert len(names) >= 5
    status, content = encoder.ask(PATH, dict.fromkeys(names) | asked())
    assert status == 200, content


def test_embedding_that_is_not_finite_fails_only_its_own_request(encoder):
    """Beside it in a pass, other texts are as long or shorter."""
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(encoder.ask, PATH, asked(input=[text] * 40)) for text in TEXTS]
        for body in (asked(input=BROKEN), asked(input=["dog", BROKEN, "fox"])):
            status, content = encoder.ask(PATH, body)
            assert (status, content["error"]["type"]) == (500, "server_error")
            assert "The model's embeddings must be finite, but one has NaN" in content["error"]["message"]
        assert [one.result()[0] for one in others] == [200] * len(others)
    encoder.wait_for(running=0, waiting=0)


def test_client_that_leaves_frees_its_places(encoder):
    bodies = [asked(input=[f"{text} fox" for text in TEXTS * 400]) for _ in range(3)]
    connections = [posted(encoder, PATH, body) for body in bodies]
    for connection in connections:
        connection.close()
    assert_answers(encoder)
    encoder.wait_for(running=0, waiting=0)


def test_large_requests_are_answered_beside_small_ones(encoder, encoder_folder):
    """The first one is as large as a request may be."""
    with ThreadPoolExecutor(8) as pool:
        many = [
            pool.submit(encoder.ask, PATH, asked(input=["fox"] * number, encoding_format="base64"))
            for number in (MOST_INPUTS, 100)
        ]
        small = [pool.submit(encoder.ask, PATH, asked(input=text)) for text in TEXTS]
        found = torch.tensor([one.result()[1]["data"][0]["embedding"] for one in small])
        sizes = [(status, len(content["data"])) for status, content in (one.result() for one in many)]
    torch.testing.assert_close(found, ours(encoder_folder, TEXTS), rtol=0, atol=1e-6)
    assert sizes == [(200, MOST_INPUTS), (200, 100)]


@pytest.mark.slow  # the largest answer, whose client differs from one that leaves only by its open connection
def test_client_that_never_reads_delays_nobody(encoder):
    with closing(posted(encoder, PATH, asked(input=["fox"] * MOST_INPUTS))):
        assert_answers(encoder)
        encoder.wait_for(running=0, waiting=0)
        assert_answers(encoder)


@pytest.mark.slow
def test_server_of_one_rank_stops_after_its_answers(encoder_folder):
    """The same as the shared server in one process, and stopped by a signal."""
    server = start(encoder_folder)
    with closing(posted(server, PATH, asked(input=TEXTS))) as connection:
        server.wait_for(running=0)
        answer = json.loads(connection.makefile("rb").read().partition(b"\r\n\r\n")[2])
    torch.testing.assert_close(
        torch.tensor([one["embedding"] for one in answer["data"]]), ours(encoder_folder, TEXTS), rtol=0, atol=1e-6
    )
    assert server.stop() == (0, "")


def test_slide_is_refused_for_an_encoder(encoder_folder):
    with pytest.raises(ConfigError, match="`--slide` must be used only with a model that generates text, but"):
        serve(str(encoder_folder), ServerOptions(slide=True, device="cpu"))


@pytest.mark.slow  # starts a server; quick tests compare its parts: requests, the embedder and the steps
def test_steps_of_a_sentence_encoder_are_served(tmp_path):
    modules = modules_of(make_trunk(tmp_path / "bert"), ["mean", "lasttoken"], "D", include_prompt=False)
    folder = write(tmp_path / ENCODER, modules, prompts={"query": "the lazy "}, default_prompt_name="query")
    server = start(folder)
    status, content = server.ask(PATH, asked(input=TEXTS))
    ended, errors = server.stop()
    assert (status, ended) == (200, 0)
    assert "The embeddings do not have the length 1" in errors
    found = torch.tensor([one["embedding"] for one in content["data"]])
    torch.testing.assert_close(found, ours(folder, TEXTS), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.double(), theirs(folder, TEXTS), rtol=0, atol=1e-5)
