"""What Python runs first in the processes that tests start: the libraries that
`TESTS_WITHOUT` names seem not to be installed (`light_processes` in `conftest.py`).
"""

import os
import sys

for name in os.environ.get("TESTS_WITHOUT", "").split():
    sys.modules[name] = None  # type: ignore[assignment]
