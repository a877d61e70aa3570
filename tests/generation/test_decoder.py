import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crosscut.config import ConfigError, GenerationError, Layout, ModelConfig
from crosscut.config.published.folders import reason_against_export
from crosscut.generation import Decoder, Piece, Sampling, decoder
from crosscut.generation.sampling import History, Numbers, choose, not_finite, rows_not_finite
from crosscut.model import Batch
from crosscut.model.cache import reading_kernels
from crosscut.model.packing import pack_weights
from tests.generation.models import FAMILIES, SIZES, make

Job = tuple[list[int], Sampling]

JOBS: list[Job] = [
    ([5, 6, 7], Sampling(num_tokens=20, temperature=1.0, top_k=40, seed=3)),  # outgrows the window of 12
    (list(range(40, 70)), Sampling(num_tokens=7, top_k=0, top_p=0.7)),  # begins longer than it
    ([1], Sampling(num_tokens=9, temperature=0.0, repetition_penalty=1.4)),
    ([8] * 10, Sampling(num_tokens=1, seed=2)),
    (
        [30, 31, 32, 33, 34, 35, 36],
        Sampling(
            num_tokens=12,
            temperature=1.5,
            top_k=0,
            seed=1,
            presence_penalty=2.0,
            frequency_penalty=-1.5,
            bias=((31, 3.0), (5, -100.0)),
        ),
    ),
]


@contextmanager
def limited(at_once: int, **others: int) -> Iterator[None]:
    """Let prompts be read in parts of a few tokens. `others` are further limits of the decoder."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"tokens_at_once": at_once, **others}.items():
            patch.setattr(decoder, f"_{name.upper()}", value)
        yield


def write(layout: Layout, family: str, jobs: Sequence[Job], num_rows: int, at_once: int = 8) -> list[list[int]]:
    """The new tokens of each job; prompts are read in pieces of a few tokens."""
    with limited(at_once, first_capacity=4):
        return texts_of(Decoder(make(layout, family), None, num_rows=num_rows, slide=True), jobs)


def texts_of(writer: Decoder, jobs: Sequence[Job]) -> list[list[int]]:
    found: dict[int, list[int]] = {writer.add(*job): [] for job in jobs}
    for piece in writer.run():
        found[piece.number].append(piece.token)
    return list(found.values())


def write_alone(family: str, jobs: Sequence[Job]) -> list[list[int]]:
    return [write(Layout(), family, [job], 1, 512)[0] for job in jobs]


def recompute(family: str, jobs: Sequence[Job], window: int = 12) -> list[list[int]]:
    """Without a cache: each token from a pass over what the text sees, by the rule in `decoder`'s docstring."""
    model = make(Layout(), family).eval()
    found = []
    for prompt, sampling in jobs:
        tokens = list(prompt)
        for _ in range(sampling.num_tokens):
            first = max(0, -((window - len(tokens)) // (window // 2))) * (window // 2)
            assert len(tokens) <= window or window // 2 < len(tokens) - first <= window
            with torch.no_grad():
                scores = model.logits(torch.tensor([tokens[first:]]))[0].float()
            number = Numbers(sampling.seed, 0, tokens).next()
            history = History(sampling, prompt, written=tokens[len(prompt) :])
            tokens.append(choose(scores, sampling, history=history, number=number))
        found.append(tokens[len(prompt) :])
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(ranks, family) -> list[list[int]]:
    return ranks.run(1, recompute, family, JOBS)[0]


def test_three_models_are_of_no_published_family():
    outside = [name for name, own in FAMILIES.items() if reason_against_export(ModelConfig(**(SIZES | own)))]
    assert outside == ["of no family", "hybrid", "windows", "blocks"]


def test_cached_texts_are_those_of_recomputing_everything(ranks, family, expected):
    assert [len(tokens) for tokens in expected] == [20, 7, 9, 1, 12]
    assert ranks.run(1, write_alone, family, JOBS)[0] == expected


LAYOUTS = [Layout(), Layout(tensor=2), Layout(tensor=4), Layout(tensor=4, sequence_parallel=True)]
LAYOUTS += [Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_and_rank_writes_the_same_beside_others(ranks, layout, family, expected):
    assert ranks.run(layout.world_size, write, layout, family, JOBS, 3) == [expected] * layout.world_size


def taken_up_again() -> tuple[list[int], list[int]]:
    sampling = Sampling(num_tokens=20, temperature=1.0, top_k=0)
    model = make()
    whole = [piece.token for piece in running(model, ([5], sampling)).run()]
    rest = [piece.token for piece in running(model, ([5, *whole[:9]], sampling)).run()]
    return whole[9:], rest[:11]


def running(model, *jobs: Job, num_rows: int = 4, **options) -> Decoder:
    writer = Decoder(model, None, num_rows=num_rows, slide=True, **options)
    for job in jobs:
        writer.add(*job)
    return writer


def test_a_text_that_is_taken_up_in_the_middle_goes_on_as_it_would_have(ranks):
    whole, rest = ranks.run(1, taken_up_again)[0]
    assert whole == rest


def samples() -> list[list[int]]:
    writer = Decoder(make(), None, num_rows=2, slide=True)
    found: list[list[int]] = [[] for _ in range(4)]
    for seed in (0, 1):
        for sample in (0, 1):
            writer.add([5], Sampling(num_tokens=10, temperature=1.0, seed=seed), sample=sample)
    for piece in writer.run():
        found[piece.number].append(piece.token)
    return found


def test_samples_and_seeds_differ(ranks):
    texts = ranks.run(1, samples)[0]
    assert len({tuple(text) for text in texts}) == 4


def by_steps() -> tuple[list[list[Piece]], bool]:
    """Three texts of 3, 1 and 2 tokens on two rows."""
    writer = running(make(), *(([5], Sampling(num_tokens=n)) for n in (3, 1, 2)), num_rows=2)
    steps = []
    while not writer.is_idle:
        steps.append(writer.step())
    return steps, not writer.step()


def test_a_step_writes_one_token_of_each_and_a_row_that_is_free_goes_to_the_next(ranks):
    steps, nothing_left = ranks.run(1, by_steps)[0]
    assert [[piece.number for piece in pieces] for pieces in steps] == [[0, 1], [0, 2], [0, 2]]
    assert [[piece.finish for piece in pieces] for pieces in steps] == [["", "length"], ["", ""], ["length", "length"]]
    assert nothing_left


def reading_beside_writing() -> list[list[int]]:
    with limited(4):
        writer = running(make(), ([5], Sampling(num_tokens=5)), ([7] * 10, Sampling(num_tokens=1)))
        steps = []
        while not writer.is_idle:
            steps.append([piece.number for piece in writer.step()])
    return steps


def test_others_go_on_while_a_long_prompt_is_read(ranks):
    assert ranks.run(1, reading_beside_writing)[0] == [[0], [0], [0, 1], [0], [0]]


def cancelled() -> tuple[list[int], list[int], bool]:
    job: Job = ([5, 6], Sampling(num_tokens=6, temperature=1.0))
    model = make()
    expected = [piece.token for piece in running(model, job).run()]
    writer = running(model, *[job] * 4, num_rows=2)
    writer.step()
    for number in (0, 2, 0):  # one that runs, one that waits, one that is gone
        writer.cancel(number)
    found: dict[int, list[int]] = {1: expected[:1], 3: []}
    for piece in writer.run():
        found[piece.number].append(piece.token)
    writer.add([5], Sampling())
    writer.step()
    writer.cancel(4)
    return expected, [found[1], found[3]], writer.is_idle


def test_cancelled_texts_are_gone_and_disturb_no_others(ranks):
    expected, others, is_idle = ranks.run(1, cancelled)[0]
    assert others == [expected, expected]
    assert is_idle


YIELDED = 40
"""Requests that a text of several lets go first, in the next tests. Serving has 2,048."""


def in_order(texts: list[tuple[int, Sampling, int]], cancelled: int | None = None) -> list[int]:
    """Numbers of the texts in the order in which they end, with one row. A text is a token of its prompt, its sampling,
    and its number within its request.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_YIELDED", YIELDED)
        writer = Decoder(make(), None, num_rows=1)
        for token, sampling, index in texts:
            writer.add([token], sampling, sample=index, index=index)
        if cancelled is not None:
            writer.cancel(cancelled)
        return [piece.number for piece in writer.run() if piece.finish]


def test_texts_of_one_request_let_a_limited_number_of_others_go_first(ranks):
    """Number 1 is cancelled while it waits."""
    many, single = Sampling(num_tokens=2, seed=1), Sampling(num_tokens=2, seed=2)
    texts = [*((5, many, index) for index in range(4)), *[(6, single, 0)] * (YIELDED + 3)]
    others = list(range(4, 4 + YIELDED + 3))
    # Number 2 has the turn 1 + 2 x 40, which is after all of them; number 3 comes last.
    assert ranks.run(1, in_order, texts, 1) == [[0, *others, 2, 3]]


def test_the_second_text_of_a_request_waits_for_no_more_than_its_share(ranks):
    one = Sampling(num_tokens=1)
    (ended,) = ranks.run(1, in_order, [(5, one, 0), (5, one, 1), *[(6, one, 0)] * (YIELDED + 3)])
    assert ended.index(1) == YIELDED


def test_requests_with_many_texts_do_not_bring_the_second_text_of_a_request_forward(ranks):
    """Only requests count, and prompts of one request count as its choices do."""
    indices = (0, 1, *[*range(20)] * 3, 0)
    (ended,) = ranks.run(1, in_order, [(5 + index, Sampling(num_tokens=1), index) for index in indices])
    assert ended[:6] == [0, 2, 22, 42, 62, 1]


def ended() -> dict[str, list[Piece]]:
    model = make()
    job: Job = ([5, 6, 7], Sampling(num_tokens=20, temperature=1.0))
    whole = list(running(model, job).run())
    stopped = list(running(model, job, stops=[whole[4].token]).run())
    full = Decoder(model, None, num_rows=1)
    full.add(*job)
    return {"whole": whole, "stopped": stopped, "full": list(full.run())}


def test_a_text_ends_at_a_stop_or_where_the_window_is_full(ranks):
    found = ranks.run(1, ended)[0]
    tokens = {name: [piece.token for piece in pieces] for name, pieces in found.items()}
    first = tokens["whole"].index(tokens["whole"][4])
    assert tokens["stopped"] == tokens["whole"][: first + 1]
    assert tokens["full"] == tokens["whole"][:10], "the last of 13 tokens need not be seen by any other"
    assert {name: [p.finish for p in pieces if p.finish] for name, pieces in found.items()} == {
        "whole": ["length"], "stopped": ["stop"], "full": ["length"]
    }  # fmt: skip


def likelihoods() -> tuple[list[Piece], torch.Tensor]:
    model = make()
    pieces = list(running(model, ([5, 6], Sampling(num_tokens=2, alternatives=3, temperature=2.0, top_k=2))).run())
    with torch.no_grad():
        scores = model.logits(torch.tensor([[5, 6]]))[0]
    return pieces, scores.log_softmax(0)


def test_probabilities_are_the_models_own(ranks):
    pieces, expected = ranks.run(1, likelihoods)[0]
    assert pieces[0].logprob == pytest.approx(float(expected[pieces[0].token]), abs=1e-5)
    top = expected.topk(3)
    assert [token for token, _ in pieces[0].alternatives] == top.indices.tolist()
    assert [logprob for _, logprob in pieces[0].alternatives] == pytest.approx(top.values.tolist(), abs=1e-5)


TOLD: list[list[int]] = [[7], list(range(40, 52)), [1, 2], [5, 6, 7, 5, 6, 7, 8], [9] * 11]


LONGER = list(range(60, 93))
"""... than the window."""


def tell(layout: Layout, family: str, alternatives: int | None, num_tokens: int) -> tuple[list[list[Piece]], int]:
    """Decode prompts that are read in parts, next to a text. Returns the probabilities of the prompts' tokens, and the
    largest number of tokens that were scored at once.
    """
    with limited(5, scored_at_once=2, first_capacity=4):
        model = make(layout, family)
        most = 0

        def logits_of(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal most
            most = max(most, hidden.shape[0])
            return type(model).logits_of(model, hidden)

        model.logits_of = logits_of
        writer = Decoder(model, None, num_rows=2, slide=True)
        writer.add([3, 4], Sampling(num_tokens=30))
        sampling = Sampling(num_tokens=num_tokens, alternatives=alternatives, tell_prompt=True, temperature=0)
        pieces: dict[int, list[Piece]] = {writer.add(prompt, sampling): [] for prompt in TOLD}
        for piece in writer.run():
            pieces.get(piece.number, []).append(piece)
    return list(pieces.values()), most


def of_whole_passes(family: str) -> list[torch.Tensor]:
    """Log probabilities [tokens, V] after each token of each prompt, by the model's own forward pass."""
    model = make(Layout(), family).eval()
    with torch.no_grad():
        return [
            model.logits_of(model(Batch(tokens=torch.tensor([prompt])))[0]).float().log_softmax(1) for prompt in TOLD
        ]


@pytest.fixture(scope="module")
def whole_passes(ranks, family) -> list[torch.Tensor]:
    return ranks.run(1, of_whole_passes, family)[0]


@pytest.mark.one_in(27)
@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_prompts_probabilities_are_those_of_a_forward_pass(ranks, layout, family, num_tokens, whole_passes):
    for texts, most_at_once in ranks.run(layout.world_size, tell, layout, family, 3, num_tokens):
        assert most_at_once == 2
        for prompt, pieces, expected in zip(TOLD, texts, whole_passes, strict=True):
            told = pieces[: len(prompt)]
            assert [piece.token for piece in told] == prompt
            assert [piece.is_prompt for piece in pieces] == [True] * len(prompt) + [False] * num_tokens
            assert [piece.finish for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
            assert (told[0].logprob, told[0].alternatives) == (None, ())
            for piece, row in zip(pieces[1:], expected, strict=num_tokens == 1):
                assert piece.logprob == pytest.approx(float(row[piece.token]), abs=1e-5)
                top = row.topk(3)
                assert [token for token, _ in piece.alternatives] == top.indices.tolist()
                assert [logprob for _, logprob in piece.alternatives] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_a_prompt_may_be_told_without_probabilities(ranks):
    texts, _ = ranks.run(1, tell, Layout(), "gpt2", None, 0)[0]
    assert [[piece.token for piece in pieces] for pieces in texts] == TOLD
    assert all(piece.logprob is None for pieces in texts for piece in pieces)


def of_no_tokens() -> list[Piece]:
    writer = running(make(), *[(prompt, Sampling(num_tokens=0)) for prompt in (*TOLD, LONGER)])
    return list(writer.run())


def test_a_text_of_no_tokens_ends_with_its_prompt(ranks):
    pieces = ranks.run(1, of_no_tokens)[0]
    found = {piece.number: (piece.token, piece.is_prompt, piece.finish) for piece in pieces}
    assert len(pieces) == len(TOLD) + 1
    assert found == {number: (prompt[-1], True, "length") for number, prompt in enumerate((*TOLD, LONGER))}


def refused(prompt: list[int], sampling: Sampling) -> None:
    Decoder(make(), None, num_rows=1, slide=sampling.tell_prompt).add(prompt, sampling)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "A prompt must have at least one token, but has none"),
        ([5, 100], Sampling(), "ids must be from 0 to 99, the model's last vocabulary entry, but are from 5 to 100"),
        ([5] * 13, Sampling(), r"must fit in the model's window \(12 tokens\), but has 13"),
        (
            [5] * 13,
            Sampling(tell_prompt=True),
            r"are requested must fit in the model's window \(12 tokens\), but has 13",
        ),
        ([5], Sampling(stop=("a",)), "`stop` needs a tokenizer to decode the tokens"),
        (
            [5],
            Sampling(bias=((7, 1.0), (100, 1.0))),
            "`bias` must have token ids from 0 to 99, the model's last vocabulary",
        ),
    ],
)
def test_impossible_prompts_are_refused(ranks, prompt, sampling, message):
    with pytest.raises(ConfigError, match=message):
        ranks.run(1, refused, prompt, sampling)


def write_packed(layout: Layout, family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Generate the same texts with plain weights and then with packed weights."""
    model = make(layout, family, dtype=torch.float32, vocab_size=101)
    found = []
    for is_packed in (False, True):
        if is_packed:
            pack_weights(model, model.mesh, num_texts=3)
            assert model.blocks[0].mlp.contract.weight._local_tensor.is_mkldnn == (layout.sharding == "none")
        found.append(texts_of(Decoder(model, None, num_rows=3, slide=True), JOBS))
    return found[0], found[1]


@pytest.mark.one_in(13)  # cut weights of one family, and the shared ones, which are not packed, of another
@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2), Layout(data=2, sharding="zero3"), Layout(), Layout(tensor=2, sequence_parallel=True)],
    ids=["cut", "shared", "one", "sequence"],
)
def test_packed_weights_write_the_same(ranks, family, layout):
    for plain, packed in ranks.run(layout.world_size, write_packed, layout, family):
        assert packed == plain
        assert [len(text) for text in plain] == [20, 7, 9, 1, 12]


def test_reading_on_a_gpu_leaves_out_the_kernel_that_plans_for_each_number_of_keys() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with reading_kernels(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    with reading_kernels(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


def broken(layout: Layout) -> Decoder:
    """A decoder of a model whose position 5 is too large for its type: there logits are not finite."""
    model = make(layout, dtype=torch.float32)
    model.positions.weight.data.to_local()[5] = 3e38
    return Decoder(model, None, num_rows=2)


def errors_of(layout: Layout) -> list[list[str]]:
    """The end of each text: its reason, or its error."""
    writer = broken(layout)
    jobs = [
        ([1] * 5, Sampling(num_tokens=6)),  # reaches the position after one token
        ([2] * 3, Sampling(num_tokens=9)),  # after three tokens, when the next text has taken the first one's row
        ([3], Sampling(num_tokens=5, temperature=0.0)),
        ([7] * 6, Sampling(num_tokens=3)),  # has the position in its prompt
        ([7] * 7, Sampling(num_tokens=0, alternatives=2, tell_prompt=True)),
    ]
    ends = {writer.add(*job): [] for job in jobs}
    while not writer.is_idle:
        for piece in writer.step():
            if piece.finish:
                ends[piece.number].append(
                    f"{type(piece.error).__name__}: {piece.error}" if piece.error else piece.finish
                )
    return list(ends.values())


LOGITS = "GenerationError: The model's logits must be finite, but are not: some are NaN at "


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_logits_that_are_not_finite_end_their_text_and_no_other(ranks, layout):
    for ends in ranks.run(layout.world_size, errors_of, layout):
        assert [[end[: len(LOGITS) + 8] for end in one] for one in ends] == [
            [LOGITS + "token 2 "],
            [LOGITS + "token 4 "],
            ["length"],
            [LOGITS + "token 1 "],
            [LOGITS + "the prom"],
        ]


def run_broken(prompt: list[int]) -> None:
    writer = broken(Layout())
    writer.add(prompt, Sampling(num_tokens=4))
    list(writer.run())


@pytest.mark.parametrize("prompt", [[1] * 4, [1] * 6, [1] * 8], ids=len)
def test_a_run_of_texts_raises_the_error_of_one(ranks, prompt):
    with pytest.raises(GenerationError, match=r"logits must be finite, but are not: some are NaN at token . after"):
        ranks.run(1, run_broken, prompt)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_the_kind_of_logits_is_told(value):
    scores = torch.zeros(3, 50)
    scores[1, 7] = value
    assert rows_not_finite(scores) == {1}
    kind = "NaN" if math.isnan(value) else "infinite"
    assert f"some are {kind} at the prompt" in str(not_finite(scores[1], "the prompt"))
    assert rows_not_finite(torch.full((2, 50), 3e38)) == set(), "their sum overflows"


def ends_after_an_error() -> list[str]:
    """One pass of two texts raises an error; the third text is not part of it."""
    model = make(Layout())
    writer = Decoder(model, None, num_rows=3)
    ends = {writer.add([9], Sampling(num_tokens=5)): ""}
    writer.step()
    ends |= {writer.add([1, 50 + one], Sampling(num_tokens=4)): "" for one in range(2)}

    def fail(_: object, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[1] == 2:  # the pass that reads the prompts
            raise MemoryError("no memory for these texts")

    handle = model.tokens.register_forward_pre_hook(fail)
    ends |= {piece.number: str(piece.error or piece.finish) for piece in writer.step() if piece.finish}
    handle.remove()
    ends[writer.add([1, 50], Sampling(num_tokens=4))] = ""
    ends |= {piece.number: piece.finish for piece in writer.run() if piece.finish}
    return list(ends.values())


def test_an_error_in_a_pass_ends_the_texts_of_the_pass_and_no_other(ranks):
    memory = "no memory for these texts"
    assert ranks.run(1, ends_after_an_error)[0] == ["length", memory, memory, "length"]


@contextmanager
def little_memory(num_bytes: int, *, largest_block: int) -> Iterator[None]:
    """Let this process take `num_bytes` more than it has. Memory that earlier jobs have freed may still belong to the
    process: this context takes it, too, until no block of `largest_block` bytes is left.
    """
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, before[1]))
    blocks = []
    try:
        with suppress(RuntimeError):
            while True:
                blocks.append(torch.empty(largest_block, dtype=torch.uint8))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def ends_without_memory(layout: Layout, short_of: int | None) -> tuple[list[str], list[list[int]]]:
    """The end and the tokens of each text. On the rank `short_of`, the cache cannot grow until all of them but the last
    have ended.
    """
    model = make(layout, max_sequence_length=1024, hidden_size=64)
    writer = Decoder(model, None, num_rows=1024)  # 34 MB a layer and rank, and 51 MB once it grows
    ends, tokens = [""] * 5, [[] for _ in range(5)]

    def run() -> None:
        while not writer.is_idle:
            for piece in writer.step():
                tokens[piece.number].append(piece.token)
                told = f"{type(piece.error).__name__}: {piece.error}" if piece.error else piece.finish
                ends[piece.number] = told or ends[piece.number]

    for prompt, number in (([1] * 5, 100), ([2], 63), ([3] * 100, 3), ([4] * 3, 20)):
        writer.add(prompt, Sampling(num_tokens=number))
    with little_memory(1 << 20, largest_block=32 << 20) if dist.get_rank() == short_of else nullcontext():
        run()
    writer.add([3] * 100, Sampling(num_tokens=3))
    run()
    return ends, tokens


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("layout", "short_of"),
    [(Layout(tensor=2), 1), (Layout(), 0), (Layout(tensor=2), 0), (Layout(data=2, sharding="zero3"), 1)],
    ids=str,
)
def test_texts_that_do_not_fit_into_the_memory_of_one_rank_end_on_all_and_no_others(ranks, layout, short_of):
    _, enough = ranks.run(1, ends_without_memory, Layout(), None)[0]
    for rank, (ends, tokens) in enumerate(ranks.run(layout.world_size, ends_without_memory, layout, short_of)):
        assert [end[:20] for end in ends] == [
            "GenerationError: The",
            "length",
            "GenerationError: The",
            "length",
            "length",
        ]
        where = "on this rank" if rank == short_of else "on another rank"
        assert f"memory, but {where} there is room for only 64 tokens in each row" in ends[0]
        assert ("allocate" in ends[0]) == (rank == short_of)
        assert tokens[1:2] + tokens[3:] == enough[1:2] + enough[3:]
        assert tokens[0][:-1] == enough[0][: len(tokens[0]) - 1]
        assert (len(tokens[0]), len(tokens[2])) == (60 + 1, 1)
