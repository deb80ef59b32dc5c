"""Each long test runs on one day in ten, and all others on every day."""

import pathlib
import re

from tests import selection

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = {"a.py": 9.0, "b.py::test_b": 4.0, "c.py::test_c": 5.0}
NAMES = [
    *("a.py::test_1", "a.py::test_2"),
    *(f"b.py::test_b[{case}]" for case in "1234"),
    *("b.py::test_short", "c.py::test_c"),
]


def test_each_long_case_is_in_one_part():
    parts = selection.dealt(NAMES, SECONDS)
    assert set(parts) == set(NAMES) - {"b.py::test_short"}
    assert set(parts.values()) == {1, 2, 3, 4, 5, 6}


def test_a_file_that_is_listed_stays_together():
    parts = selection.dealt(NAMES, SECONDS)
    assert parts["a.py::test_1"] == parts["a.py::test_2"]


def test_parts_do_not_depend_on_the_order_of_the_tests():
    assert selection.dealt(NAMES[::-1], SECONDS) == selection.dealt(NAMES, SECONDS)


def test_parts_take_equally_long():
    seconds = selection.listed()
    parts = selection.dealt([f"{name}[0]" for name in seconds], seconds)
    totals = dict.fromkeys(range(1, selection.PARTS + 1), 0.0)
    for name, part in parts.items():
        totals[part] += seconds[name.removesuffix("[0]")]
    assert max(totals.values()) < 1.1 * min(totals.values())


def test_what_is_listed_is_there():
    for name in selection.listed():
        file, _, test = name.partition("::")
        text = (ROOT / file).read_text()
        for part in filter(None, test.split("::")):
            assert re.search(rf"^\s*(def|class) {part}\b", text, re.M), name


def test_what_takes_long_is_read_from_durations():
    lines = """
== slowest durations ==
9.00s setup    tests/a.py::test_1[x]
1.00s call     tests/a.py::test_1[x]
8.00s call     tests/b.py::test_b[two words]
2.00s setup    tests/b.py::test_b[1]
2.00s call     tests/b.py::test_b[1]
0.90s call     tests/b.py::test_short
9.00s teardown tests/b.py::test_short
"""
    assert selection.long_ones(lines.splitlines()) == {
        "tests/a.py": 10.0,
        "tests/b.py::test_b": 6.0,
    }
