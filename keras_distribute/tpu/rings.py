"""Ways through a mesh of chips that end beside where they began, so that neighbours in
a ring are neighbours on wires. TensorFlow's order.
"""

from __future__ import annotations

import itertools


def ring(x: int, y: int, z: int) -> list[tuple[int, int, int]]:
    """All coordinates of a mesh, from `(0, 0, 0)` on; a ring where two sizes are above
    1 and those are even.
    """
    above_one = [size for size in (x, y, z) if size > 1]
    if len(above_one) < 2 or any(size % 2 for size in above_one):
        places = itertools.product(range(z), range(y), range(x))
        return [(i, j, k) for k, j, i in places]
    if z == 1:
        return [(i, j, 0) for i, j in _plane(x, y)]
    if y == 1:
        return [(i, 0, k) for i, k in _plane(x, z)]
    if x == 1:
        return [(0, j, k) for j, k in _plane(y, z)]
    # Up through the planes, each without its corner; down through the corners.
    path = [(0, 0, 0)]
    for k in range(z):
        plane = [(i, j, k) for i, j in _plane(x, y)[1:]]
        path += plane if k % 2 == 0 else plane[::-1]
    return path + [(0, 0, k) for k in range(z - 1, 0, -1)]


def _plane(width: int, height: int) -> list[tuple[int, int]]:
    """To and fro through the rows; the first column leads back to the corner."""
    path = [(0, 0)]
    for row in range(height):
        columns = range(1, width) if row % 2 == 0 else range(width - 1, 0, -1)
        path += [(column, row) for column in columns]
    return path + [(0, row) for row in range(height - 1, 0, -1)]
