"""The rounds of a schedule, carried out without Python.

A program is a schedule and the state of its present round, as one vector of int64. What moves a round on is compiled
and runs without the GIL: a rank is pulled through a round while its training thread holds the GIL, and who is woken
need not bring an interpreter's memory back into the caches first, which takes 150 us with 32 ranks on 2 cores. What is
not among the kinds below is handed to Python.

Source: eager-SGD (Li et al.), sec. 4.1.1 and 4.3: consumable operations, persistent schedules, external activation,
offloading.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.core import types
from numba.core.typing import signature

from hocket.arrays import Array
from hocket.kernels.compiling import compiled, compiled_once, fence, pointer_to
from hocket.transport.host.rings import (
    RING_KEY,
    RING_MESSAGE,
    RING_NBYTES,
    RING_ROUND,
    RING_SOURCE,
    RING_WORDS,
    WORD_BYTES,
    words_of_ring,
)

__all__ = ["IDLE", "ROUND_ENDED", "arrive", "expect", "finish", "go_on", "hear", "prepare", "serve", "take"]

# ---- A program's header ----
ROUND = 0  # the round that is armed or will be next
WANTED = 1  # the application has triggered the rounds before this one
ARMED = 2
LAST_MISSING = 3  # how many of the last operations are not done
UNDER_WAY = 4  # sends that Python performs, and receives of data: a round does not end before they do
HEAD, TAIL, QUEUE = 5, 6, 7  # the operations to be performed are program[QUEUE + HEAD : QUEUE + TAIL]
TELLING = 8  # whether somebody wants to know when a round ends
NUM_DONE = 9  # operations, in all rounds
NUM_OPERATIONS = 10
NUM_LAST = 11
TRIGGER = 12  # an operation, or -1
PERSISTENT = 13
RANK = 14  # this one, as it signs its rings
PLACES = 15  # at PLACES + source * NUM_TAGS + tag, the receive that takes what comes with a ring, or -1
NUM_SOURCES, NUM_TAGS = 16, 17
HEADER = 18  # words

# ---- An operation's record ----
KIND = 0
NEEDED, MISSING = 1, 2  # how many dependencies must be done before it fires: of all, and of this round's
FIRED, DONE = 3, 4
IS_LAST = 5
DEPENDENTS, NUM_DEPENDENTS = 6, 7  # program[DEPENDENTS:][:NUM_DEPENDENTS] depend on it
TO, FROM, NBYTES = 8, 9, 10  # addresses
DESCRIPTOR, KEY, TAG = 8, 11, 12  # of a RING: the other's pipe, and as what it knows the ring
HEARD = 8  # of a HEAR: the newest round that a notice has come for
EXPECTED, NUM_EARLY = 11, 12  # of an EXPECT: its round or -1; how many for later ones Python keeps
DTYPE = 11  # of an ADD: one of ADDABLE
LOCK, CLEARS, STAMP = 11, 12, 13  # of a COPY
FIELDS = 14  # words

# ---- Kinds ----
HANDED = 0  # to Python
NOTHING = 1
RING = 2  # sends NBYTES at FROM with a ring; a notice has none
HEAR = 3  # receives a notice
EXPECT = 4  # receives NBYTES to TO with a ring
ADD, COPY = 5, 6
_FLOAT32, _FLOAT64, _INT32, _INT64 = range(4)
#: The dtypes that an ADD knows, and what it calls them.
ADDABLE = {"float32": _FLOAT32, "float64": _FLOAT64, "int32": _INT32, "int64": _INT64}

#: What `go_on` returns in place of an operation.
IDLE, ROUND_ENDED = -1, -2

_LATER, _NOW, _BY_PYTHON = range(3)
_words_of_ring = compiled(words_of_ring)
_WORD, _AN_INT32 = np.zeros(1, np.int64), np.zeros(1, np.int32)
_A_FLOAT32, _A_FLOAT64 = np.zeros(1, np.float32), np.zeros(1, np.float64)
_read = types.ExternalFunction("read", signature(types.int64, types.int32, types.uint64, types.uint64))
_write = types.ExternalFunction("write", signature(types.int64, types.int32, types.uint64, types.uint64))
_copy = types.ExternalFunction("memmove", signature(types.uint64, types.uint64, types.uint64, types.uint64))
_fill = types.ExternalFunction("memset", signature(types.uint64, types.uint64, types.int32, types.uint64))
_lock = types.ExternalFunction("pthread_mutex_lock", signature(types.int32, types.uint64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", signature(types.int32, types.uint64))


def prepare() -> None:
    """Compile all that Python calls here, or load it: not when other ranks wait for the first round."""
    word, words, table = types.int64, types.int64[::1], types.int64[:, ::1]
    called: list[tuple[Any, ...]] = [
        (go_on, words, words),
        (take, words),
        (finish, words, word),
        (expect, words, word),
        (arrive, words, word),
        (hear, words, word, word),
        (serve, word, words, table, words, words, words, types.boolean),
    ]
    with compiled_once(serve):  # the last one: where it is kept, all are
        for function, *arguments in called:
            function.compile(tuple(arguments))


@compiled
def go_on(program: Array, scratch: Array) -> int:
    """Do everything that can be done now; never blocks.

    Args:
        program: a schedule's.
        scratch: [words of the largest ring] int64.

    Returns:
        An operation that Python is to `take`, perform and, once it is done, `finish`; ROUND_ENDED if somebody wants to
        know of it, and IDLE where nothing is left.
    """
    while True:
        if not program[ARMED] and (program[PERSISTENT] or program[ROUND] < program[WANTED]):
            _arm(program)
        if program[ARMED] and program[ROUND] < program[WANTED] and program[TRIGGER] >= 0:
            _fire_once(program, program[TRIGGER])
        while program[HEAD] < program[TAIL]:
            i = program[program[QUEUE] + program[HEAD]]
            outcome = _perform(program, HEADER + i * FIELDS, scratch)
            if outcome == _BY_PYTHON:
                return i
            take(program)
            if outcome == _NOW:
                finish(program, i)
        if not program[ARMED] or program[LAST_MISSING] or program[UNDER_WAY]:
            return IDLE
        program[ARMED] = 0
        fence()  # who sees that the round has ended sees what it has written
        program[ROUND] += 1
        fence()  # who has set TELLING before it looked at the round is told
        if program[TELLING]:
            return ROUND_ENDED


@compiled
def take(program: Array) -> None:
    """Take the first operation from the queue: who calls this performs it."""
    program[HEAD] += 1


@compiled
def finish(program: Array, i: int) -> None:
    """Note that operation `i` is done, and have fire what waits for no other."""
    at = HEADER + i * FIELDS
    program[at + DONE] = 1
    program[NUM_DONE] += 1
    program[LAST_MISSING] -= program[at + IS_LAST]
    first = program[at + DEPENDENTS]
    for place in range(first, first + program[at + NUM_DEPENDENTS]):
        dependent = program[place]
        program[HEADER + dependent * FIELDS + MISSING] -= 1
        if program[HEADER + dependent * FIELDS + MISSING] <= 0:
            _fire_once(program, dependent)


@compiled
def hear(program: Array, i: int, round: int) -> None:
    """Take in a notice of `round`, of which the newest counts, for receive `i`."""
    at = HEADER + i * FIELDS
    program[at + HEARD] = max(program[at + HEARD], round)
    fired = program[ARMED] and program[at + FIRED]
    if fired and not program[at + DONE] and program[at + HEARD] >= program[ROUND]:
        finish(program, i)


@compiled
def expect(program: Array, i: int) -> None:
    """Have receive `i` take what comes with a ring in the present round."""
    program[HEADER + i * FIELDS + EXPECTED] = program[ROUND]
    program[UNDER_WAY] += 1


@compiled
def arrive(program: Array, i: int) -> None:
    """Note that what receive `i` was to take with a ring lies where it belongs."""
    program[HEADER + i * FIELDS + EXPECTED] = -1
    program[UNDER_WAY] -= 1
    finish(program, i)


@compiled
def serve(
    reading: int, called: Array, programs: Array, rings: Array, left: Array, scratch: Array, blocks: bool
) -> int:
    """Read what has rung, and go on with the programs that it is for, until something is left for Python.

    Args:
        reading: a pipe, of which each read brings whole rings.
        called: [1] int64, not 0 if another thread of this rank wants Python to look, whether its ring had room or not.
        programs: [number of keys, 2] address and length of each key's program; 0 where it has none.
        rings: what is read into, int64.
        left: like `rings`; gets what is for no program, or not now.
        scratch: see `go_on`.
        blocks: whether to read again where nothing is left for Python; else return at once.

    Returns:
        How many words of `left` are rings; perhaps 0, if a program has handed something over or a signal has come.
    """
    while True:
        nbytes = _read(reading, rings.ctypes.data, rings.nbytes)
        num_left = 0
        at = 0
        while at < nbytes // WORD_BYTES:
            words = _words_of_ring(max(rings[at + RING_NBYTES], 0))
            key = rings[at + RING_KEY]
            if not (0 <= key < len(programs) and programs[key, 0] and _take_in(programs[key], rings, at)):
                left[num_left : num_left + words] = rings[at : at + words]
                num_left += words
            at += words
        handed = nbytes <= 0 or called[0] != 0
        for key in range(len(programs)):
            if programs[key, 0]:
                handed |= go_on(_program(programs[key]), scratch) != IDLE
        if num_left or handed or not blocks:
            return num_left


@compiled
def _program(address_and_length: Array) -> Array:
    return carray(pointer_to(np.uint64(address_and_length[0]), _WORD), (address_and_length[1],))


@compiled
def _take_in(address_and_length: Array, rings: Array, at: int) -> bool:
    """Give the ring at `rings[at]` to the receive that waits for it, if there is one."""
    program = _program(address_and_length)
    source, tag = rings[at + RING_SOURCE], rings[at + RING_MESSAGE]
    if source >= program[NUM_SOURCES] or tag >= program[NUM_TAGS]:
        return False
    i = program[program[PLACES] + source * program[NUM_TAGS] + tag]
    if i < 0 or rings[at + RING_NBYTES] < 0:
        return False
    receive = HEADER + i * FIELDS
    if program[receive + KIND] == HEAR:
        hear(program, i, rings[at + RING_ROUND])
        return True
    nbytes = program[receive + NBYTES]
    if program[receive + EXPECTED] != rings[at + RING_ROUND] or nbytes != rings[at + RING_NBYTES]:
        return False
    message = np.uint64(rings.ctypes.data + WORD_BYTES * (at + RING_WORDS))
    _copy(np.uint64(program[receive + TO]), message, np.uint64(nbytes))
    arrive(program, i)
    return True


@compiled
def _arm(program: Array) -> None:
    program[ARMED] = 1
    program[LAST_MISSING] = program[NUM_LAST]
    program[HEAD] = program[TAIL] = 0
    for i in range(program[NUM_OPERATIONS]):
        at = HEADER + i * FIELDS
        program[at + MISSING] = program[at + NEEDED]
        program[at + FIRED] = program[at + DONE] = 0
    for i in range(program[NUM_OPERATIONS]):
        if not program[HEADER + i * FIELDS + NEEDED] and i != program[TRIGGER]:
            _fire_once(program, i)


@compiled
def _fire_once(program: Array, i: int) -> None:
    if not program[HEADER + i * FIELDS + FIRED]:
        program[HEADER + i * FIELDS + FIRED] = 1
        program[program[QUEUE] + program[TAIL]] = i
        program[TAIL] += 1


@compiled
def _perform(program: Array, at: int, scratch: Array) -> int:
    """Do what the operation at `program[at]` does, and return whether it is done now, later, or by Python."""
    kind = program[at + KIND]
    outcome = _NOW
    if kind == RING:
        outcome = _NOW if _ring(program, at, scratch) else _BY_PYTHON
    elif kind == HEAR:
        # Not again, if the notice has come while the operation stood in the queue.
        heard = program[at + HEARD] >= program[ROUND] and not program[at + DONE]
        outcome = _NOW if heard else _LATER
    elif kind == EXPECT and not program[at + NUM_EARLY]:
        expect(program, (at - HEADER) // FIELDS)
        outcome = _LATER
    elif kind == ADD:
        _add(program, at)
    elif kind == COPY:
        _copy_locked(program, at)
    elif kind != NOTHING:
        outcome = _BY_PYTHON
    return outcome


@compiled
def _ring(program: Array, at: int, scratch: Array) -> bool:
    nbytes = program[at + NBYTES]
    words = _words_of_ring(nbytes)
    scratch[RING_KEY] = program[at + KEY]
    scratch[RING_SOURCE] = program[RANK]
    scratch[RING_MESSAGE] = program[at + TAG]
    scratch[RING_ROUND] = program[ROUND]
    scratch[RING_NBYTES] = nbytes
    start = np.uint64(scratch.ctypes.data)
    _copy(start + np.uint64(WORD_BYTES * RING_WORDS), np.uint64(program[at + FROM]), np.uint64(nbytes))
    return (
        _write(np.int32(program[at + DESCRIPTOR]), start, np.uint64(WORD_BYTES * words)) == WORD_BYTES * words
    )


@compiled
def _copy_locked(program: Array, at: int) -> None:
    to, source = np.uint64(program[at + TO]), np.uint64(program[at + FROM])
    nbytes, lock = np.uint64(program[at + NBYTES]), np.uint64(program[at + LOCK])
    if lock:
        _lock(lock)
    _copy(to, source, nbytes)
    if program[at + CLEARS]:
        _fill(source, np.int32(0), nbytes)
    if program[at + STAMP]:
        carray(pointer_to(np.uint64(program[at + STAMP]), _WORD), (1,))[0] = program[ROUND]
    if lock:
        _unlock(lock)


@compiled
def _add(program: Array, at: int) -> None:
    dtype = program[at + DTYPE]
    if dtype == _FLOAT32:
        _add_as(program, at, _A_FLOAT32)
    elif dtype == _FLOAT64:
        _add_as(program, at, _A_FLOAT64)
    elif dtype == _INT32:
        _add_as(program, at, _AN_INT32)
    else:
        _add_as(program, at, _WORD)


@compiled
def _add_as(program: Array, at: int, like: Array) -> None:
    size = program[at + NBYTES] // like.itemsize
    total = carray(pointer_to(np.uint64(program[at + TO]), like), (size,))
    addend = carray(pointer_to(np.uint64(program[at + FROM]), like), (size,))
    for i in range(size):
        total[i] += addend[i]
