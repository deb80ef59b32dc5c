"""`python -m keras_distribute.dry_run`."""

import sys

from keras_distribute.dry_run.command import main

if __name__ == "__main__":
    sys.exit(main())
