"""Chainer's example `seq2seq` in the blocks that it requests from its pool.

Sentences run on three layers of LSTM, by `examples/seq2seq/seq2seq.py` and `functions/connection/n_step_rnn.py` of
Chainer. Each call of cuDNN's LSTM gathers the weights of all layers in one block of 96 MiB. It lives as long as the
call in inference, and to the end of backward in training. cuDNN's reserve for backward is assumed to have the gates,
the cell and the output of each layer. Its workspace is unpublished and assumed to be empty. Integer arrays are left
out, except the words found in inference, which stay until the sentence is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from overspill.core import Block, Trace
from overspill.placement.simulated_device import round_up
from overspill_papers.placement.allocators.chainer import STEP_BYTES

VOCABULARY, UNITS, LAYERS, GATES = 40_002, 1024, 3, 4
LENGTHS, GENERATED = range(1, 50), 100
"""Words of a sentence in training (`0 < len < 50` in the script), and in inference always (§5.3)."""
ROW = 4 * UNITS
"""Bytes of a word's state."""
EMBEDDING = VOCABULARY * ROW
LSTM = LAYERS * 2 * GATES * (UNITS + 1) * ROW
"""Bytes of the weights and biases of an LSTM: for each gate of a layer two matrices."""
WEIGHTS = (EMBEDDING, EMBEDDING, LSTM, LSTM, EMBEDDING + 4 * VOCABULARY)


def held_bytes(*, training: bool) -> int:
    """Return the bytes allocated before a step: weights, and in training gradients and the two moments of Adam."""
    return sum(round_up(nbytes, STEP_BYTES) for nbytes in WEIGHTS) * (4 if training else 1)


def in_turn(traces: Sequence[Trace]) -> Trace:
    """Return the steps `traces`, one after the other."""
    blocks: list[Block] = []
    for trace in traces:
        begun = max((block.end for block in blocks), default=0)
        blocks += [
            replace(block, id=len(blocks) + block.id, start=begun + block.start, end=begun + block.end)
            for block in trace.blocks
        ]
    return Trace(tuple(blocks))


class _DecoderStep:
    """Blocks as they are allocated and freed."""

    def __init__(self) -> None:
        self._now = 0
        self._blocks: list[Block] = []
        self._live: dict[int, tuple[int, int]] = {}

    def take(self, *sizes: int) -> list[int]:
        """Allocate blocks of so many bytes."""
        taken = []
        for nbytes in sizes:
            self._now += 1
            self._live[self._now] = self._now, round_up(nbytes, STEP_BYTES)
            taken.append(self._now)
        return taken

    def give(self, blocks: list[int]) -> None:
        self._now += 1
        for block in blocks:
            start, nbytes = self._live.pop(block)
            self._blocks.append(Block(block, start, self._now, nbytes))

    @contextmanager
    def taken(self, *sizes: int) -> Iterator[None]:
        """Allocate blocks that are freed at the end of the context."""
        blocks = self.take(*sizes)
        yield
        self.give(blocks)

    def done(self) -> Trace:
        """Return the trace, in which all remaining blocks are freed."""
        self.give([*self._live])
        return Trace(tuple(sorted(self._blocks, key=lambda block: block.start)))


def inference(words: int) -> Trace:
    """Return the blocks of translating one sentence of so many words."""
    step = _DecoderStep()
    embedded = step.take(words * ROW)
    state = step.take(LAYERS * ROW, LAYERS * ROW)
    old, (state, outputs) = state, _inferred(step, words)
    step.give([*old, *embedded, *outputs])
    scores: list[int] = []
    for _ in range(GENERATED):
        embedded = step.take(ROW)
        old, (state, outputs) = state, _inferred(step, 1)
        step.give(old)
        joined = step.take(ROW)
        step.give(scores)  # those of the word before, until the variable is another
        scores = step.take(4 * VOCABULARY)
        step.take(4)  # the word found
        step.give([*embedded, *outputs, *joined])
    return step.done()


def _inferred(step: _DecoderStep, words: int) -> tuple[list[int], list[int]]:
    """Return the states and outputs of an LSTM of one sentence."""
    turned = step.take(*[ROW] * words)
    (cell,) = step.take(LAYERS * ROW)
    with step.taken(words * ROW):
        made = step.take(words * ROW)
        with step.taken(LSTM):
            (hidden,) = step.take(LAYERS * ROW)
    outputs = step.take(words * ROW)
    step.give([*turned, *made])
    return [hidden, cell], outputs


def training(lengths: Sequence[int], reserved: float = 1.0) -> Trace:
    """Return the blocks of a step on sentences of these lengths, whose translations are one word longer, their end.

    cuDNN reserves `reserved` times the assumed bytes.
    """
    step, states = _DecoderStep(), LAYERS * len(lengths) * ROW
    read, written = sum(lengths), sum(lengths) + len(lengths)
    step.take(read * ROW, written * ROW)  # embedded
    step.take(states, states)
    for words in (read, written):
        step.take(words * ROW, states)
        with step.taken(words * ROW):
            step.take(words * ROW, LSTM, states, round(reserved * LAYERS * (GATES + 2) * words * ROW))
        step.take(words * ROW)
    scores = 4 * VOCABULARY * written
    step.take(written * ROW, scores)
    with step.taken(scores):
        step.take(scores)
    # Backward: of scores, of the last layer, and of both LSTMs with their embeddings.
    with step.taken(scores):
        gradient = step.take(written * ROW)
        with step.taken(EMBEDDING):
            pass
    for words in (written, read):
        with step.taken(words * ROW, words * ROW, states, states):
            moved = step.take(words * ROW)
            with step.taken(LSTM):
                step.give(gradient)
        gradient = [] if words == read else step.take(read * ROW)
        with step.taken(EMBEDDING):
            step.give(moved)
    return step.done()
