"""Ways through a mesh of chips that end beside where they began, so that neighbours in
a ring are neighbours on wires.

TensorFlow's order, so that a device assignment is the same here and there.
"""

from __future__ import annotations

import itertools

Place = tuple[int, int, int]


def ring(x: int, y: int, z: int) -> list[Place]:
    """Each place of a mesh once, from `(0, 0, 0)` on; a ring where two sizes are above
    1 and those are even.
    """
    sizes = (x, y, z)
    if sum(size > 1 for size in sizes) < 2 or any(
        size > 1 and size % 2 for size in sizes
    ):
        return [
            (i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))
        ]
    if z == 1:
        return [(i, j, 0) for i, j in _plane(x, y)]
    if y == 1:
        return [(i, 0, k) for i, k in _plane(x, z)]
    if x == 1:
        return [(0, j, k) for j, k in _plane(y, z)]
    path: list[Place] = [(0, 0, 0)]
    for k in range(
        z
    ):  # Up through the planes, each without its corner; down through the corners.
        plane = [(i, j, k) for i, j in _plane(x, y)[1:]]
        path += plane if k % 2 == 0 else plane[::-1]
    return path + [(0, 0, k) for k in range(z - 1, 0, -1)]


def _plane(width: int, height: int) -> list[tuple[int, int]]:
    """To and fro through the rows, but for the first column, which leads back to the
    corner.
    """
    path = [(0, 0)]
    for row in range(height):
        columns = range(1, width) if row % 2 == 0 else range(width - 1, 0, -1)
        path += [(column, row) for column in columns]
    return path + [(0, row) for row in range(height - 1, 0, -1)]
