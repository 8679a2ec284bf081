"""The shapes of MXNet's operators: of their outputs, and of weights that they infer.

A function takes a node and the shapes of its inputs. It fills in those that it can infer, and returns the outputs'.
A size of 0 is not known yet, as in MXNet 1.5.
"""

from __future__ import annotations

from math import ceil, prod

from overspill.core.errors import UnsupportedError

from .symbol import Node

Shape = tuple[int, ...]
Shapes = list[Shape | None]


def known(node: Node, shapes: Shapes, index: int = 0) -> Shape:
    """Return the shape of one input, which must be known by now."""
    shape = shapes[index] if index < len(shapes) else None
    if shape is None or 0 in shape:
        raise UnsupportedError(
            f"the shape of input {index} of {node.name} ({node.op}) is not known; give it with --input"
        )
    return shape


def fill(shapes: Shapes, index: int, shape: Shape) -> None:
    before = shapes[index] if index < len(shapes) else shape
    if before is None or 0 in before:
        shapes[index] = shape


def same(node: Node, shapes: Shapes) -> list[Shape]:
    first = next((shape for shape in shapes if shape is not None and 0 not in shape), None)
    if first is None:
        return [known(node, shapes)]
    for index in range(len(shapes)):
        fill(shapes, index, first)
    return [first]


def concat(node: Node, shapes: Shapes, default: int = 1) -> list[Shape]:
    first = known(node, shapes)
    axis = node.number("dim", default) % len(first)
    total = sum(known(node, shapes, i)[axis] for i in range(len(shapes)))
    return [(*first[:axis], total, *first[axis + 1 :])]


def slice_channel(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    count, axis = node.number("num_outputs", 1), node.number("axis", 1) % len(data)
    part = (*data[:axis], data[axis] // count, *data[axis + 1 :])
    if node.flag("squeeze_axis"):
        part = (*data[:axis], *data[axis + 1 :])
    return [part] * count


def reshape(node: Node, shapes: Shapes) -> list[Shape]:
    """Return the shape of MXNet's Reshape.

    0 keeps a dimension, -1 takes the remaining elements, -2 copies the rest, -3 joins two, -4 splits one by the next
    two.
    """
    data = known(node, shapes)
    wanted, made, at = list(node.numbers("shape")), [], 0
    while wanted:
        size = wanted.pop(0)
        if size == -4:
            one, other = wanted.pop(0), wanted.pop(0)
            made += [data[at] // other if one == -1 else one, data[at] // one if other == -1 else other]
        elif size == -2:
            made += data[at:]
            at = len(data)
            continue
        else:
            made.append(data[at] if size == 0 else data[at] * data[at + 1] if size == -3 else size)
            at += size == -3
        at += 1
    # What is left goes to the dimension -1.
    left = prod(data) // max(1, prod(size for size in made if size != -1))
    return [tuple(left if size == -1 else size for size in made)]


def transpose(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    return [tuple(data[axis] for axis in node.numbers("axes", tuple(reversed(range(len(data))))))]


def swap_axes(node: Node, shapes: Shapes) -> list[Shape]:
    made = list(known(node, shapes))
    one, other = node.number("dim1", 0), node.number("dim2", 0)
    made[one], made[other] = made[other], made[one]
    return [tuple(made)]


def flatten(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    return [(data[0], prod(data[1:]))]


def expand_dims(node: Node, shapes: Shapes) -> list[Shape]:
    data, axis = known(node, shapes), node.number("axis", 0)
    axis %= len(data) + 1
    return [(*data[:axis], 1, *data[axis:])]


def slice_axis(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axis = node.number("axis", 0) % len(data)
    begin, end = node.number("begin", 0), node.attrs.get("end", "None")
    part = slice(begin, None if end == "None" else int(end))
    return [(*data[:axis], len(range(data[axis])[part]), *data[axis + 1 :])]


def sliced(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    parts = zip(*(node.places(name) for name in ("begin", "end")), strict=True)
    steps = node.places("step")
    made = [
        len(range(data[axis])[slice(begin, end, steps[axis] if axis < len(steps) else None)])
        for axis, (begin, end) in enumerate(parts)
    ]
    return [(*made, *data[len(made) :])]


def slice_like(node: Node, shapes: Shapes) -> list[Shape]:
    data, like = known(node, shapes, 0), known(node, shapes, 1)
    axes = {axis % len(data) for axis in node.numbers("axes", tuple(range(len(like))))}
    return [tuple(like[i] if i in axes else size for i, size in enumerate(data))]


def batch_dot(node: Node, shapes: Shapes) -> list[Shape]:
    left, right = known(node, shapes, 0), known(node, shapes, 1)
    rows = left[-1] if node.flag("transpose_a") else left[-2]
    columns = right[-2] if node.flag("transpose_b") else right[-1]
    (batch,) = broadcast(node, [left[:-2] or (1,), right[:-2] or (1,)])
    return [(*(batch if max(len(left), len(right)) > 2 else ()), rows, columns)]


def broadcast(node: Node, shapes: Shapes) -> list[Shape]:
    read = [known(node, shapes, i) for i in range(len(shapes))]
    rank = max(map(len, read))
    return [tuple(map(max, *((1,) * (rank - len(shape)) + shape for shape in read)))]


def reduced(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axes = {axis % len(data) for axis in node.numbers("axis", tuple(range(len(data))))}
    if node.flag("exclude"):
        axes = set(range(len(data))) - axes
    if node.flag("keepdims"):
        return [tuple(1 if i in axes else size for i, size in enumerate(data))]
    return [tuple(size for i, size in enumerate(data) if i not in axes) or (1,)]


def stack(node: Node, shapes: Shapes) -> list[Shape]:
    data, axis = known(node, shapes), node.number("axis", 0)
    axis %= len(data) + 1
    return [(*data[:axis], len(shapes), *data[axis:])]


def squeeze(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axes = {axis % len(data) for axis in node.numbers("axis", tuple(i for i, size in enumerate(data) if size == 1))}
    return [tuple(size for i, size in enumerate(data) if i not in axes) or (1,)]


def like_second(node: Node, shapes: Shapes) -> list[Shape]:
    """Return the shape of the second input, where the attributes name no part of it."""
    return [known(node, shapes, 1)]


def crop(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    image = known(node, shapes, 1)[2:] if len(shapes) > 1 else node.numbers("h_w")
    return [(*data[:2], *image)]


def padded(node: Node, shapes: Shapes) -> list[Shape]:
    data, width = known(node, shapes), node.numbers("pad_width")
    return [tuple(size + width[2 * i] + width[2 * i + 1] for i, size in enumerate(data))]


def tile(node: Node, shapes: Shapes) -> list[Shape]:
    data, times = known(node, shapes), node.numbers("reps")
    rank = max(len(data), len(times))
    data, times = (1,) * (rank - len(data)) + data, (1,) * (rank - len(times)) + times
    return [tuple(size * count for size, count in zip(data, times, strict=True))]


def repeat(node: Node, shapes: Shapes) -> list[Shape]:
    data, count = known(node, shapes), node.number("repeats", 1)
    if node.attrs.get("axis", "None") == "None":
        return [(prod(data) * count,)]
    axis = node.number("axis", 0) % len(data)
    return [(*data[:axis], data[axis] * count, *data[axis + 1 :])]


def broadcast_to(node: Node, shapes: Shapes) -> list[Shape]:
    data, wanted = known(node, shapes), node.numbers("shape")
    data = (1,) * (len(wanted) - len(data)) + data
    return [tuple(size or before for size, before in zip(wanted, data, strict=True))]


def broadcast_axis(node: Node, shapes: Shapes) -> list[Shape]:
    data = list(known(node, shapes))
    for axis, size in zip(node.numbers("axis"), node.numbers("size"), strict=True):
        data[axis] = size
    return [tuple(data)]


def made_of_nothing(node: Node, _: Shapes) -> list[Shape]:
    if node.op != "_arange":
        return [node.numbers("shape")]  # a 0 is inferred from what reads it
    stop, step = node.attrs.get("stop", "None"), float(node.attrs.get("step", "1"))
    start, end = float(node.attrs.get("start", "0")), 0.0
    start, end = (0.0, start) if stop == "None" else (start, float(stop))
    return [(ceil((end - start) / step) * node.number("repeat", 1),)]


def one_hot(node: Node, shapes: Shapes) -> list[Shape]:
    return [(*known(node, shapes), node.number("depth", 1))]


def picked(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axis = node.number("axis", -1) % len(data)
    made = tuple(1 if i == axis else size for i, size in enumerate(data))
    if not node.flag("keepdims"):
        made = (*data[:axis], *data[axis + 1 :])
    fill(shapes, 1, made)
    return [made or (1,)]


def take(node: Node, shapes: Shapes) -> list[Shape]:
    data, indices = known(node, shapes, 0), known(node, shapes, 1)
    axis = node.number("axis", 0) % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def gather_nd(node: Node, shapes: Shapes) -> list[Shape]:
    data, indices = known(node, shapes, 0), known(node, shapes, 1)
    return [(*indices[1:], *data[indices[0] :]) or (1,)]


def dot(node: Node, shapes: Shapes) -> list[Shape]:
    left, right = known(node, shapes, 0), known(node, shapes, 1)
    left = left[1:] if node.flag("transpose_a") else left[:-1]
    right = right[:-1] if node.flag("transpose_b") else right[1:]
    return [(*left, *right) or (1,)]


def argument(node: Node, shapes: Shapes) -> list[Shape]:
    """Return the shape of `argmax` and `argmin`."""
    return picked(node, [*shapes[:1]])


def top(node: Node, shapes: Shapes) -> list[Shape]:
    data = list(known(node, shapes))
    data[node.number("axis", -1)] = node.number("k", 1)
    return [tuple(data)] * (2 if node.attrs.get("ret_typ") == "both" else 1)


def shape_array(node: Node, shapes: Shapes) -> list[Shape]:
    return [(len(known(node, shapes)),)]


def one_number(node: Node, shapes: Shapes) -> list[Shape]:
    known(node, shapes)
    return [(1,)]


def depth_to_space(node: Node, shapes: Shapes) -> list[Shape]:
    batch, channels, *image = known(node, shapes)
    block = node.number("block_size", 1)
    return [(batch, channels // block**2, *(size * block for size in image))]


def space_to_depth(node: Node, shapes: Shapes) -> list[Shape]:
    batch, channels, *image = known(node, shapes)
    block = node.number("block_size", 1)
    return [(batch, channels * block**2, *(size // block for size in image))]


def one_size(_: Node, read: Shapes, made: Shapes) -> None:
    """Find the one unknown size of what is reshaped."""
    shape, whole = read[0], made[0] if made else None
    if shape is not None and shape.count(0) == 1 and whole is not None and 0 not in whole:
        left = prod(whole) // prod(size for size in shape if size)
        read[0] = tuple(size or left for size in shape)
