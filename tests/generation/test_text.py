from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from crosscut.config import Layout
from crosscut.data import Tokenizer
from crosscut.generation import Decoder, Piece, Sampling, continue_text
from crosscut.generation.text import SpecialIds
from tests.generation.models import make


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(["as it was said of old, so it was done, and so it is"] * 4, vocab_size=280).save(path)
    return path


def pieces(path: Path, stop: tuple[str, ...]) -> list[Piece]:
    tokenizer = Tokenizer.load(path)
    writer = Decoder(make(vocab_size=tokenizer.vocab_size), tokenizer, num_rows=1, slide=True)
    writer.add(tokenizer.encode("so it"), Sampling(num_tokens=60, temperature=1.0, stop=stop))
    return list(writer.run())


def test_the_text_ends_before_a_stop_string(ranks, tokenizer):
    whole = "".join(piece.text for piece in ranks.run(1, pieces, tokenizer, ())[0])
    stop = whole[20:23]
    stopped = ranks.run(1, pieces, tokenizer, (stop,))[0]
    assert "".join(piece.text for piece in stopped) == whole[: whole.index(stop)]
    assert [piece.finish for piece in stopped if piece.finish] == ["stop"]


def test_pieces_are_the_text_of_the_tokens(ranks, tokenizer):
    written = ranks.run(1, pieces, tokenizer, ())[0]
    ids = [piece.token for piece in written]
    assert "".join(piece.text for piece in written) == Tokenizer.load(tokenizer).decode(ids)
    assert len(ids) == 60


def while_training(
    path: Path, layout: Layout, prompt: str = "so it", stops: tuple[int, ...] = ()
) -> tuple[str, bool, bool]:
    """Text of `continue_text` for a model in training mode, whether the model is still in training mode, and whether
    its parameters have the same names and shapes.
    """
    tokenizer = Tokenizer.load(path)
    tokens = SimpleNamespace(tokenizer=lambda: tokenizer, end_of_text=tokenizer.end_of_text)
    model = make(layout, vocab_size=tokenizer.vocab_size).train()
    names = {name: parameter.shape for name, parameter in model.named_parameters()}
    text = continue_text(
        model, tokens, prompt, Sampling(num_tokens=20, temperature=1.0), special=SpecialIds(stops=stops)
    )
    return text, model.training, names == {name: parameter.shape for name, parameter in model.named_parameters()}


def test_a_special_token_in_a_prompt_of_a_run_is_read(ranks, tokenizer):
    empty, spelled = (ranks.run(1, while_training, tokenizer, Layout(), one)[0][0] for one in ("", "<|endoftext|>"))
    assert spelled == "<|endoftext|>" + empty


def test_the_text_of_a_run_ends_at_its_stops(ranks, tokenizer):
    written = ranks.run(1, pieces, tokenizer, ())[0]
    third = next(piece for piece in written[2:] if piece.token not in {one.token for one in written[:2]})
    whole, stopped = (
        ranks.run(1, while_training, tokenizer, Layout(), "so it", one)[0][0] for one in ((), (third.token,))
    )
    assert whole.startswith(stopped)
    assert len(stopped) < len(whole)


LAYOUTS = [Layout(tensor=2, sequence_parallel=True), Layout(), Layout(data=2, sharding="zero3")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_model_in_training_writes_without_dropout_and_stays_in_training(ranks, tokenizer, layout):
    whole = "".join(piece.text for piece in ranks.run(1, pieces, tokenizer, ())[0])
    text, training, same = ranks.run(layout.world_size, while_training, tokenizer, layout)[-1]
    assert text.startswith("so it")
    assert ("so it" + whole).startswith(text)
    assert training
    assert same


def stopped_while_training(path: Path, layout: Layout) -> tuple[int, bool]:
    """Number of pieces that `continue_text` passes on before it is stopped, and whether the model is in training mode
    afterwards.
    """
    tokenizer = Tokenizer.load(path)
    tokens = SimpleNamespace(tokenizer=lambda: tokenizer, end_of_text=tokenizer.end_of_text)
    model, seen = make(layout, vocab_size=tokenizer.vocab_size).train(), []

    def first_three(pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if len(seen) == 3:
                raise KeyboardInterrupt
            seen.append(piece)
            yield piece

    sampling = Sampling(num_tokens=20, temperature=1.0)
    with pytest.raises(KeyboardInterrupt):
        continue_text(model, tokens, "so it", sampling, around=first_three)
    return len(seen), model.training


def test_a_text_of_a_run_can_be_stopped_at_each_piece(ranks, tokenizer):
    assert ranks.run(2, stopped_while_training, tokenizer, Layout(tensor=2)) == [(3, True)] * 2
