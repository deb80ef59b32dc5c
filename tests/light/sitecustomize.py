"""What Python runs first in the processes that tests start: the libraries that
`TESTS_WITHOUT` names seem not to be installed, and XLA gets the flags of
`TESTS_XLA_FLAGS` (`light_processes` in `conftest.py`).
"""

import os
import sys

for name in os.environ.get("TESTS_WITHOUT", "").split():
    sys.modules[name] = None  # type: ignore[assignment]

if flags := os.environ.get("TESTS_XLA_FLAGS"):
    own = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = own if flags in own else f"{own} {flags}".strip()
