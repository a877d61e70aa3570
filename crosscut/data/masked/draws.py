"""Random bits as a pure function of a key and an index, for many indexes at once.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the i-th number of a stream is a mix of start + i x
`_STEP`, in 64-bit integers. Every index has its own stream, so a sample can be drawn without the samples before it. The
bits do not depend on the version of numpy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: int) -> np.uint64:
    """Return a key that depends on all parts, such as a seed, a number for the purpose of the key, and the number of a
    shard.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mixed(_mixed(key + _STEP) + np.array([part % 2**64], dtype=np.uint64) * _STEP)
    return np.uint64(key[0])


def random_bits(key: np.uint64, indexes: Sequence[int] | npt.NDArray[np.int64], count: int) -> Bits:
    """Return `count` random 64-bit numbers for each index, [indexes, count]."""
    starts = _mixed(np.asarray(indexes, dtype=np.int64).astype(np.uint64) * _STEP + key)
    return _mixed(starts[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP)


def to_uniform(bits: Bits) -> npt.NDArray[np.float64]:
    """Turn random bits into numbers that are uniform in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: Bits) -> Bits:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
