"""The selection of a parameter's elements: from those that passed a floor to the communication-set and the next floor.

Every method needs one pass over the residual, the one that accumulates the gradient, if it knows a floor that a few
times k elements pass. The step before knows one: residuals change little from step to step. Where none is known, or it
turns out wrong, a sample of the residual gives one and a second pass, which only reads, picks out what passes it.

Source: Fang et al., "RedSync", section 2.1 and algorithms 2 and 3. There, the floors are mean + r (max - mean) for r
from a ladder (trimmed) or by bisection (threshold), each tried by a pass that counts. The selection is the same:
the k largest, or all that reach one threshold which k to 2 k elements reach. Our floor is read off the last step's
candidates, and the exact place among these few is found by partitioning them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hocket.api import Array
from hocket_redsync.kernels.api import NOTHING_PASSES, SMALLEST_KEY, Found, Kernels, Memory, Ranking

#: The number of steps that use a threshold again before a new search.
SAMPLED_INTERVAL = 5

# Candidates aimed at, in multiples of k: fewer cost less, more are rarely too few in the next step.
_AIM = 3
_MOST_FALL = 0.15
_SAMPLE_SIZE = 1 << 16
_LEAST_CAPACITY = 4096


class Method(StrEnum):
    """Methods to find a parameter's communication-set.

    Attributes:
        DENSE: all is sent, nothing is kept back.
        EXACT: the k largest, by a partition of all elements: the reference, and the usual implementation.
        TRIMMED: the k largest.
        THRESHOLD: all that reach one threshold, which k to 2 k elements do; the k largest where ties allow none.
        SAMPLED: the same, with a threshold that is used in 5 more steps, and is searched at once where less than k
            elements or more than 4 k reach it.
    """

    DENSE = "dense"
    EXACT = "exact"
    TRIMMED = "trimmed"
    THRESHOLD = "threshold"
    SAMPLED = "sampled"


@dataclass(frozen=True, eq=False)
class Selected:
    """The elements that a parameter sends in a round, and the floor of the next round.

    Attributes:
        indices: places in the segment, int32, each once, in no particular order.
        values: V there.
        floor: the key from which the next round of this ranking picks candidates.
        age: the number of rounds in which the floor has served as the threshold that sends all that reach it; 0 where
            it only picks candidates.
    """

    indices: Array
    values: Array
    floor: int
    age: int = 0


def most_selected(method: Method, k: int, numel: int) -> int:
    """Return the most elements that a parameter can send: k, 2 k or 4 k of its `numel`."""
    factor = {Method.THRESHOLD: 2, Method.SAMPLED: 4}.get(method, 1)
    return min(factor * k, numel)


def capacity_of(k: int, numel: int) -> int:
    """Return the number of candidates, of `numel` elements, that there is room for."""
    return min(numel, max(_LEAST_CAPACITY, 16 * k))


def select(
    kernels: Kernels,
    memory: Memory,
    ranking: Ranking,
    method: Method,
    k: int,
    found: Found,
    floor: int,
    age: int,
) -> Selected:
    """Return the communication-set of one parameter, whose residual is up to date.

    Args:
        kernels: those of the residual's device.
        memory: the parameter's.
        ranking: the order by which elements are large.
        method: any but `DENSE`.
        k: 1 to numel.
        found: the elements that passed `floor` when the residual was updated.
        floor: the last round's.
        age: the last round's.
    """
    if method is Method.EXACT:
        return _exact(memory, ranking, k)
    if age and found.complete and k <= found.count <= most_selected(method, k, len(memory.residual)):
        # The last step with a threshold leaves a floor, from which the next one finds candidates.
        if age < SAMPLED_INTERVAL:
            return Selected(found.indices, found.values, floor, age + 1)
        following = _following(ranking.keys(found.values), found.values.dtype, k)
        return Selected(found.indices, found.values, following)
    if not found.complete or (found.count < k and floor != SMALLEST_KEY):
        found, floor = search(kernels, memory, ranking, k)
    return _among(found, ranking, method, k)


def _among(found: Found, ranking: Ranking, method: Method, k: int) -> Selected:
    """Return the communication-set among the candidates, of which there is room for all."""
    keys = ranking.keys(found.values)
    if len(keys) < k:  # the others are zeros
        return Selected(found.indices, found.values, SMALLEST_KEY)
    threshold = None if method is Method.TRIMMED else _threshold(keys, k)
    chosen = _largest(keys, k, found.indices) if threshold is None else np.flatnonzero(keys >= threshold)
    if method is Method.SAMPLED and threshold is not None:
        return Selected(found.indices[chosen], found.values[chosen], threshold, age=1)
    following = _following(keys, found.values.dtype, k)
    return Selected(found.indices[chosen], found.values[chosen], following)


def search(kernels: Kernels, memory: Memory, ranking: Ranking, k: int) -> tuple[Found, int]:
    """Return candidates among which the k largest are, and the floor that they passed.

    At least k, unless fewer elements are larger than zero: then all these, with the floor `SMALLEST_KEY`.
    """
    numel = len(memory.residual)
    sampled = np.sort(ranking.keys(kernels.sample(memory.residual, min(_SAMPLE_SIZE, numel))))[::-1]
    # The sample's element of this rank is reached by about _AIM * k of all.
    rank, lowest, highest = _AIM * k * len(sampled) / numel, 0.0, float(len(sampled))
    tried = set()
    while True:
        floor = max(SMALLEST_KEY, int(sampled[min(int(rank), len(sampled) - 1)]))
        if floor in tried:
            return _exhaustive(memory, ranking, k)
        tried.add(floor)
        handle = kernels.advance(memory, None, ranking, floor, capacity_of(k, numel))
        [found] = kernels.collect([handle])
        if not found.complete:
            highest = rank
        elif found.count >= k or floor == SMALLEST_KEY:
            return found, floor
        else:
            lowest = rank
        rank = (lowest + highest) / 2 if highest < len(sampled) else 4 * rank + 1


def _exhaustive(memory: Memory, ranking: Ranking, k: int) -> tuple[Found, int]:
    """Return all elements that reach the k-th largest if those are at most 2 k, else the k largest.

    It is for parameters with so many equal elements that no element of a sample is a floor.
    """
    values = memory.residual.detach().cpu().numpy()
    keys = ranking.keys(values)
    floor = max(SMALLEST_KEY, _key_at(keys, k))
    chosen = np.flatnonzero(keys >= floor)
    if len(chosen) > 2 * k:
        chosen = _largest(keys, k, np.arange(len(keys)))
    indices = (chosen + memory.start).astype(np.int32)
    return Found(indices, values[chosen], len(chosen)), floor


def _exact(memory: Memory, ranking: Ranking, k: int) -> Selected:
    values = memory.residual.detach().cpu().numpy()
    keys = ranking.keys(values)
    chosen = _largest(keys, k, np.arange(len(keys)))
    chosen = chosen[keys[chosen] >= SMALLEST_KEY]
    indices = (chosen + memory.start).astype(np.int32)
    return Selected(indices, values[chosen], NOTHING_PASSES[values.dtype.itemsize])


def _key_at(keys: Array, rank: int) -> int:
    """Return the `rank`-th largest key, from 1 to n."""
    place = len(keys) - rank
    return int(np.partition(keys, place)[place])


def _largest(keys: Array, k: int, indices: Array) -> Array:
    """Return the places of the k largest keys; of equal ones those with the lowest `indices`."""
    if k >= len(keys):
        return np.arange(len(keys))
    threshold = _key_at(keys, k)
    above = np.flatnonzero(keys > threshold)
    ties = np.flatnonzero(keys == threshold)
    wanted = k - len(above)
    if wanted < len(ties):
        ties = ties[np.argsort(indices[ties], kind="stable")[:wanted]]
    return np.concatenate([above, ties])


def _threshold(keys: Array, k: int) -> int | None:
    """Return a key, or None, that k to 2 k candidates reach, with room on both sides if possible."""
    for rank in (k + k // 2, k):
        if rank <= len(keys):
            key = _key_at(keys, rank)
            if np.count_nonzero(keys >= key) <= 2 * k:
                return key
    return None


def _following(keys: Array, dtype: np.dtype[np.floating], k: int) -> int:
    """Return the key that about `_AIM` times k elements reach; `keys` are the largest, at least k of them.

    Where they are fewer, the value goes on falling with the logarithm of the rank as it does in their lower half, and
    by 0.15 of itself at most: more than there are in the tails of uniform and normal values, and in heavy ones.
    """
    if len(keys) > _AIM * k:
        return _key_at(keys, _AIM * k)
    lowest, middle = (_value(_key_at(keys, rank), dtype) for rank in (len(keys), -(-len(keys) // 2)))
    fall = (middle - lowest) * math.log2(_AIM * k / len(keys))
    if not fall <= _MOST_FALL * lowest:  # also where the middle is Inf or NaN
        fall = _MOST_FALL * lowest
    return max(SMALLEST_KEY, int(np.array(lowest - fall, dtype).view(keys.dtype)))


def _value(key: int, dtype: np.dtype[np.floating]) -> float:
    """Return the value that has a key."""
    return float(np.array(key, f"i{dtype.itemsize}").view(dtype))
