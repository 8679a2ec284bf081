"""Traces of training steps of any size, for benchmarks of placement: the lifetimes and sizes that networks have.

A network is a list of operations. Its step runs them forward, keeps what the backward pass will read, runs backward in
reverse, and then updates the weights. Each operation is one position of the trace. Sizes are multiples of 512 bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from overspill.core import Block, Trace

ALIGNMENT = 512
MIB = 1 << 20


@dataclass(frozen=True)
class Op:
    """One operation: the earlier ones that it reads, what it makes, and what it needs (all sizes in bytes).

    `extras` are further results that only its backward pass reads, such as statistics and masks; `forward_scratch` and
    `backward_scratch` live for one position. The backward pass reads the inputs or the output where they are `saved`.
    """

    inputs: tuple[int, ...]
    nbytes: int
    saves_inputs: bool = False
    saves_output: bool = False
    extras: tuple[int, ...] = ()
    forward_scratch: tuple[int, ...] = ()
    backward_scratch: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()


class Network:
    """Operations in the order in which they run; `add` gives the number of the new one."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(
        self,
        inputs: Sequence[int],
        nbytes: float,
        *,
        saves: str = "",
        extras: Sequence[float] = (),
        scratch: tuple[Sequence[float], Sequence[float]] = ((), ()),
        weights: Sequence[float] = (),
    ) -> int:
        """Append an operation; `saves` names what is kept for backward: "in", "out" or "in out"."""
        sizes = [tuple(_rounded(x) for x in column if x > 0) for column in (extras, *scratch, weights)]
        saved = ("in" in saves, "out" in saves)
        self.ops.append(Op(tuple(inputs), _rounded(nbytes), *saved, *sizes))
        return len(self.ops) - 1


@dataclass
class Interval:
    """A block in the making: live from `start` to the last position that uses it."""

    start: int
    end: int
    nbytes: int


@dataclass
class Tape:
    """A clock of positions and the blocks so far."""

    now: int = 0
    blocks: list[Interval] = field(default_factory=list)

    def new(self, nbytes: int) -> Interval:
        """A block that is made and used now."""
        block = Interval(self.now, self.now + 1, nbytes)
        self.blocks.append(block)
        return block

    def use(self, *blocks: Interval) -> None:
        """Keep the blocks until after this position."""
        for block in blocks:
            block.end = self.now + 1

    def step(self) -> None:
        """Go to the next position."""
        self.now += 1


class Pass:
    """One forward and backward pass of a network; `given` stands for the result of operation 0."""

    def __init__(self, tape: Tape, network: Network, given: Interval | None = None) -> None:
        self.tape, self.ops, self.given = tape, network.ops, given
        self.results: list[Interval] = []
        self.extras: list[list[Interval]] = []

    def forward(self) -> Interval:
        """Run all operations; the last result."""
        tape = self.tape
        for op in self.ops:
            if self.given is not None and not self.results:
                self.results.append(self.given)
                self.extras.append([])
                continue
            self.results.append(tape.new(op.nbytes))
            tape.use(*(self.results[k] for k in op.inputs))
            for nbytes in op.forward_scratch:
                tape.new(nbytes)
            self.extras.append([tape.new(nbytes) for nbytes in op.extras])
            tape.step()
        return self.results[-1]

    def backward(self, gradient: Interval) -> tuple[Interval, list[Interval]]:
        """Run all operations backward from the gradient of the last result; that of the first, and those of weights."""
        tape = self.tape
        gradients = {len(self.ops) - 1: gradient}
        of_weights: list[Interval] = []
        first = 0 if self.given is None else 1
        for k in range(len(self.ops) - 1, first - 1, -1):
            op = self.ops[k]
            if k not in gradients:
                continue
            tape.use(gradients[k], *self.extras[k])
            if op.saves_output:
                tape.use(self.results[k])
            if op.saves_inputs:
                tape.use(*(self.results[i] for i in op.inputs))
            for nbytes in op.backward_scratch:
                tape.new(nbytes)
            of_weights += [tape.new(nbytes) for nbytes in op.weights]
            parts = [(i, tape.new(self.ops[i].nbytes)) for i in op.inputs]
            tape.step()
            for i, part in parts:
                if i in gradients:  # a sum in a new block; both terms die
                    total = tape.new(part.nbytes)
                    tape.use(part, gradients[i])
                    tape.step()
                    gradients[i] = total
                else:
                    gradients[i] = part
        return gradients.get(0, gradient), of_weights


def training_step(network: Network, *, updates: bool = True) -> Tape:
    """Forward, loss, backward and, if it `updates`, an optimizer with two scratch blocks a weight."""
    tape = Tape()
    run = Pass(tape, network)
    result = run.forward()
    gradient = tape.new(result.nbytes)
    tape.use(result)
    tape.step()
    _, of_weights = run.backward(gradient)
    if updates:
        for weight in of_weights:
            tape.use(weight)
            tape.new(weight.nbytes)
            tape.new(weight.nbytes)
            tape.step()
    return tape


def resnet(depth: int, r: random.Random, batch: int = 32) -> Tape:
    """Four stages of `depth` bottlenecks (the third of twice as many), convolutions with workspaces of many sizes."""
    network = Network()

    def convolution(
        x: int, c_in: int, c_out: int, kernel: int, side: int, stride: int = 1, *, relu: bool = True
    ) -> int:
        nbytes = batch * c_out * (side // stride) ** 2 * 4
        work = r.choice([0.25, 0.5, 1, 1.5, 2.25]) * batch * c_in * side**2 * 4
        forward = [work] if kernel > 1 or r.random() < 0.3 else []
        backward = [work * r.choice([0.5, 1, 2]), work] if kernel > 1 else [work / 2]
        weights = [c_in * c_out * kernel**2 * 4]
        x = network.add([x], nbytes, saves="in", scratch=(forward, backward), weights=weights)
        x = network.add([x], nbytes, saves="in", extras=[c_out * 4] * 2, weights=[c_out * 4] * 2)
        return network.add([x], nbytes, saves="out") if relu else x

    image = network.add([], batch * 3 * 224**2 * 4)
    x = convolution(image, 3, 64, 7, 224, 2)
    x = network.add([x], batch * 64 * 56**2 * 4, saves="in", extras=[batch * 64 * 56**2 * 8])
    side, channels = 56, 64
    for stage, count in enumerate((depth, depth, 2 * depth, depth)):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = convolution(x, channels, width, 1, side)
            y = convolution(y, width, width, 3, side, stride)
            y = convolution(y, width, 4 * width, 1, side // stride, relu=False)
            if not block:
                x = convolution(x, channels, 4 * width, 1, side, stride, relu=False)
            side //= stride
            channels = 4 * width
            nbytes = batch * channels * side**2 * 4
            x = network.add([network.add([x, y], nbytes)], nbytes, saves="out")
    x = network.add([x], batch * channels * 4)
    network.add([x], batch * 4000, saves="in", weights=[channels * 4000])
    return training_step(network)


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder; `item` is the bytes of a number."""

    batch: int = 4
    sequence: int = 1024
    width: int = 1024
    heads: int = 16
    item: int = 2
    flash: bool = True
    vocabulary: int = 50257

    @property
    def nbytes(self) -> int:
        """The bytes of one activation of the width of the model."""
        return self.batch * self.sequence * self.width * self.item

    def layer(self, network: Network, x: int, r: random.Random) -> int:
        """Append one pre-norm layer."""
        n, square, rows = self.nbytes, 4 * self.width**2, self.batch * self.sequence * 4
        norm = {"saves": "in", "extras": [rows] * 2, "weights": [self.width * 4] * 2}
        y = network.add([x], n, **norm)  # type: ignore[arg-type]
        y = network.add([y], 3 * n, saves="in", scratch=([r.choice([0, 1, 2, 4]) * MIB], ()), weights=[3 * square])
        if self.flash:
            y = network.add([y], n, saves="in out", extras=[rows * self.heads], scratch=((), [4 * n / self.item]))
        else:
            scores = self.batch * self.heads * self.sequence**2
            s = network.add([y], scores * self.item, saves="in")
            s = network.add([s], scores * self.item, saves="out")
            s = network.add([s], scores * self.item, extras=[scores])
            y = network.add([s, y], n, saves="in")
        y = network.add([y], n, saves="in", weights=[square])
        if r.random() < 0.5:
            y = network.add([y], n, extras=[n / self.item])
        x = network.add([x, y], n)
        y = network.add([x], n, **norm)  # type: ignore[arg-type]
        y = network.add([y], 4 * n, saves="in", weights=[4 * square])
        y = network.add([y], 4 * n, saves="in")
        y = network.add([y], n, saves="in", scratch=([r.choice([0, 1, 8]) * MIB], ()), weights=[4 * square])
        return network.add([x, y], n)

    def layers(self, count: int, r: random.Random) -> Network:
        """A network of `count` layers, without embedding and head."""
        network = Network()
        x = network.add([], self.nbytes)
        for _ in range(count):
            x = self.layer(network, x, r)
        return network


def gpt(depth: int, r: random.Random, shape: Transformer | None = None) -> Tape:
    """A decoder of `depth` layers that keeps all activations."""
    shape = shape or Transformer()
    network = shape.layers(depth, r)
    rows = shape.batch * shape.sequence * 4
    x = network.add([len(network.ops) - 1], shape.nbytes, saves="in", extras=[rows] * 2)
    logits = rows * shape.vocabulary // 4
    x = network.add([x], logits * shape.item, saves="in", weights=[shape.width * shape.vocabulary * 4])
    network.add([x], rows, saves="in", extras=[logits * 4])
    return training_step(network, updates=shape.flash)


def gpt_full_attention(depth: int, r: random.Random) -> Tape:
    """A decoder whose attention keeps its scores."""
    return gpt(depth, r, Transformer(batch=2, sequence=512, width=768, heads=12, item=4, flash=False))


def gpt_checkpointed(depth: int, r: random.Random) -> Tape:
    """A decoder that keeps the inputs of its layers alone and runs each layer again before its backward pass."""
    shape, tape = Transformer(batch=8, sequence=2048, width=2048), Tape()
    networks = [shape.layers(1, r) for _ in range(depth)]
    inputs = [tape.new(shape.nbytes)]
    tape.step()
    for network in networks:
        inputs.append(Pass(tape, network, inputs[-1]).forward())
    logits = tape.new(shape.batch * shape.sequence * shape.vocabulary * shape.item)
    tape.use(inputs[-1])
    tape.step()
    gradient = tape.new(shape.nbytes)
    tape.use(logits)
    tape.step()
    of_weights: list[Interval] = []
    for network, x in zip(reversed(networks), reversed(inputs[:-1]), strict=True):
        again = Pass(tape, network, x)
        again.forward()
        tape.use(x)
        gradient, more = again.backward(gradient)
        of_weights += more
    for weight in of_weights:
        tape.use(weight)
        tape.step()
    return tape


def pipeline(depth: int, r: random.Random, stages: int = 4, layers: int = 4) -> Tape:
    """The first of `stages` stages of a 1F1B pipeline: `depth` microbatches of different sequence lengths.

    Their forward and backward passes alternate, so the lifetimes of different microbatches cross.
    """
    tape = Tape()
    running: list[Pass] = []
    for k in range(depth + stages):
        if k < depth:
            shape = Transformer(batch=2, sequence=r.choice([512, 1024, 1536, 2048]), width=2048)
            running.append(Pass(tape, shape.layers(layers, r)))
            running[-1].forward()
        if k >= stages - 1 and running:
            run = running.pop(0)
            gradient = tape.new(run.results[-1].nbytes)
            tape.step()
            run.backward(gradient)
    return tape


def unet(depth: int, r: random.Random, batch: int = 4) -> Tape:
    """Five levels down and up with `depth` convolutions each; long skip connections nest."""
    network = Network()

    def level(x: int, c_in: int, c_out: int, side: int) -> int:
        for _ in range(depth):
            n = batch * c_out * side**2 * 2
            scratch = ([n * r.choice([0.25, 0.5, 1])], [n * r.choice([0.5, 1])])
            x = network.add([x], n, saves="in", scratch=scratch, weights=[c_in * c_out * 36])
            x = network.add([x], n, saves="in", extras=[batch * 128] * 2)
            x = network.add([x], n, saves="in")
            c_in = c_out
        return x

    side, channels = 512, 3
    x = network.add([], batch * channels * side**2 * 2)
    skips: list[tuple[int, int]] = []
    for k in range(5):
        x = level(x, channels, min(64 << k, 1024), side)
        channels = min(64 << k, 1024)
        skips.append((x, channels))
        side //= 2
        x = network.add([x], batch * channels * side**2 * 2, extras=[batch * channels * side**2])
    x = level(x, channels, channels, side)
    for skip, c_skip in reversed(skips):
        side *= 2
        x = network.add([x], batch * channels * side**2 * 2)
        x = network.add([x, skip], batch * (channels + c_skip) * side**2 * 2)
        x = level(x, channels + c_skip, c_skip, side)
        channels = c_skip
    network.add([x], batch * 4 * side**2 * 2, saves="in")
    return training_step(network)


def branchy(depth: int, r: random.Random, batch: int = 32) -> Tape:
    """A directed acyclic graph of `depth` operations, each with one to three of the last eight results as inputs."""
    network = Network()
    network.add([], batch * 3 * 224**2 * 4)
    side, channels = 56, 64
    for k in range(depth):
        if k and k % max(1, depth // 4) == 0 and side > 7:
            side, channels = side // 2, channels * 2
        n = batch * int(channels * r.choice([0.25, 0.5, 0.75, 1, 1.5, 2, 4])) * side**2 * 4
        inputs = sorted({r.randrange(max(0, k - 7), k + 1) for _ in range(r.choice([1, 1, 2, 3]))})
        saves = "in" * (r.random() < 0.6) + "out" * (r.random() < 0.3)
        forward = [n * r.choice([0.1, 0.3, 0.7, 1.3])] if r.random() < 0.4 else []
        backward = [n * r.choice([0.1, 0.3, 0.7, 1.3])] if r.random() < 0.6 else []
        extras = [r.choice([channels * 4, n / 4])] if r.random() < 0.4 else []
        weights = [channels**2 * 36] if r.random() < 0.5 else []
        network.add(inputs, n, saves=saves, extras=extras, scratch=(forward, backward), weights=weights)
    return training_step(network)


def offloaded(make: Callable[[int, random.Random], Tape]) -> Callable[[int, random.Random], Tape]:
    """The same step with half of the large blocks of long life offloaded: each becomes one early and one late block."""

    def split(depth: int, r: random.Random) -> Tape:
        tape = make(depth, r)
        whole, tape.blocks = tape.blocks, []
        for block in whole:
            if block.end - block.start > 60 and block.nbytes > MIB and r.random() < 0.5:
                tape.blocks.append(Interval(block.start, block.start + 1 + r.randint(6, 24), block.nbytes))
                tape.blocks.append(Interval(block.end - r.randint(6, 24), block.end, block.nbytes))
            else:
                tape.blocks.append(block)
        return tape

    return split


FAMILIES: dict[str, Callable[[int, random.Random], Tape]] = {
    "resnet": resnet,
    "gpt": gpt,
    "gpt-full-attention": gpt_full_attention,
    "gpt-checkpointed": gpt_checkpointed,
    "gpt-offloaded": offloaded(gpt),
    "pipeline": pipeline,
    "unet": unet,
    "branchy": branchy,
    "branchy-offloaded": offloaded(branchy),
}


def training_trace(family: str, count: int, seed: int = 0) -> Trace:
    """A trace of about `count` blocks of one of `FAMILIES`; the same arguments give the same trace."""
    make = FAMILIES[family]
    few, more = (len(make(depth, random.Random(seed)).blocks) for depth in (8, 40))
    depth = max(1, round(8 + (count - few) * 32 / (more - few)))
    tape = make(depth, random.Random(seed))
    return Trace(tuple(Block(i, b.start, b.end, b.nbytes) for i, b in enumerate(tape.blocks)))


def _rounded(nbytes: float) -> int:
    """Up to the next multiple of the alignment."""
    return -(-int(nbytes) // ALIGNMENT) * ALIGNMENT or ALIGNMENT
