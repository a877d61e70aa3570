"""Check that a mixture draws samples from its token folders in the proportions of `data.mixture`, on every layout.

The check counts the tokens of each folder in the batches of all data ranks. The folders are made up: they have
different numbers of files, and every token has the number of its folder as its id. The weights of the folders come from
the run.
"""

from collections.abc import Sequence

import numpy as np

from crosscut.data import Sampler, Shard
from crosscut.data.mixture import BLOCK_SAMPLES, MixedSampler, shares_of
from crosscut.data.shards.writing import INDEX_DTYPE
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.verification.report import MIXTURE, ReportCheck

_LENGTH = 4
"""Number of tokens per sample."""
_SAMPLES_AT_ONCE = 64
"""Number of samples per batch on one data rank."""


def compare_mixture(weights: Sequence[float], mesh: ParallelMesh, *, seed: int) -> list[ReportCheck]:
    """Check that folders with these weights get their shares of the samples. Every rank must call this function. The
    list has one check on the first rank and is empty on the others.

    In each block of samples, every folder must have its share, rounded up or down. The batches of all data ranks
    together must equal the batch that a single rank would read.
    """
    samplers = [Sampler(_made_up_shards(number), sequence_length=_LENGTH, seed=seed) for number in range(len(weights))]
    samples = MixedSampler(samplers, weights, seed=seed)
    rank, size = mesh.reader
    batch_size = _SAMPLES_AT_ONCE * size
    steps = range(-(-2 * BLOCK_SAMPLES // batch_size))
    own = [samples.batch(i, batch_size=batch_size, rank=rank, size=size).tokens for i in steps]
    every = gather_to_first((rank, np.stack(own)))
    if every is None:
        return []
    slices = dict(every)
    batches = np.concatenate([slices[number] for number in range(size)], axis=1)
    whole = np.stack([samples.batch(i, batch_size=batch_size).tokens for i in steps])
    shares = shares_of(weights)
    found = np.bincount(batches.ravel(), minlength=len(weights)) / batches.size
    difference = max(abs(found - shares))
    is_sliced = np.array_equal(batches, whole)
    told = f"shares {_listed(found.tolist())}; `data.mixture` asks for {_listed(shares)}"
    told += "" if is_sliced else "; the batches of all data ranks together are not the batch of a single rank"
    return [ReportCheck(MIXTURE, float(difference), is_sliced and difference <= 2 / BLOCK_SAMPLES, told)]


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.3g}" for share in shares)


def _made_up_shards(number: int) -> list[Shard]:
    """Shards of a made-up folder. The folder `number` has `number` + 1 shards, and its tokens are all `number`."""
    index = np.zeros(8, dtype=INDEX_DTYPE)
    index["end"] = np.arange(1, 9) * (10 + number)
    tokens = np.full(index["end"][-1], number, dtype=np.uint16)
    return [Shard(f"train-{i}", tokens, index, ("made up",)) for i in range(number + 1)]
