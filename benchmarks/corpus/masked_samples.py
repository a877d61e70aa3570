"""Speed of making batches: causal samples, pairs of segments with masks, and packed documents with masks.

    python benchmarks/corpus/masked_samples.py                    # the built-in corpus, with a trained WordPiece
    python benchmarks/corpus/masked_samples.py --tokens FOLDER    # a token folder for masked language modelling

One thread makes batches of each kind in turn; the medians count. The rate is in tokens of processor time, padding
included. A training step reads the next batch in a thread beside the step.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line
from benchmarks.machine import print_machine
from benchmarks.turns import alternate
from crosscut.config import DataConfig
from crosscut.data import Tokens, masked_samples, prepare, training_samples


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=Path, help="token folder made with data.objective=masked")
    parser.add_argument("--text", default="builtin:state-of-the-union", help="text, if there is no token folder")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(arguments)
    print_machine("numpy")
    with tempfile.TemporaryDirectory() as scratch:
        made = DataConfig(text=(options.text,), vocab_size=4096, objective="masked", num_shards=2)
        opened = DataConfig(tokens=str(options.tokens), objective="masked")
        tokens = prepare(opened if options.tokens else made, Path(scratch) / "tokens", seed=1, progress=False)
        rates = measure(tokens, options.sequence_length, options.batch_size, turns=options.turns)
    for name, rate in rates.items():
        print(f"{name:8} {rate / 1e6:6.2f} million tokens/s")


def measure(tokens: Tokens, length: int, batch_size: int, *, turns: int) -> dict[str, float]:
    """Median rates of each kind of sample, in tokens per second of processor time."""
    config = DataConfig(objective="masked")
    causal = training_samples(tokens, sequence_length=length, seed=1)
    pairs = masked_samples(tokens, config, sequence_length=length, seed=1)
    packed = masked_samples(tokens, replace(config, pairs=False), sequence_length=length, seed=1)
    makers: dict[str, Callable[[int], object]] = {
        "causal": lambda first: causal.batch_at(first, batch_size),
        "pairs": lambda first: pairs.batch_at(first, batch_size),
        "packed": lambda first: packed.batch_at(first, batch_size),
    }
    first = {name: count(0, batch_size) for name in makers}

    def timed(name: str) -> float:
        start = time.process_time()
        makers[name](next(first[name]))
        return time.process_time() - start

    seconds = alternate({name: partial(timed, name) for name in makers}, turns)
    return {name: batch_size * length / statistics.median(taken) for name, taken in seconds.items()}


if __name__ == "__main__":
    main()
