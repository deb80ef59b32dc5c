"""The table of differences: every one is relied on by a test, and every test's is in
the table.
"""

import re
from pathlib import Path

from .comparing import record
from .differences import DIFFERENCES


def test_differences_are_those_that_the_tests_rely_on():
    sources = "".join(
        path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))
    )
    assert set(re.findall(r'because\("([^"]+)"', sources)) == set(DIFFERENCES)


def test_record_says_what_made_it():
    assert set(record()["header"]) == {
        "command",
        "python",
        "tensorflow",
        "tf_keras",
        "devices",
    }
