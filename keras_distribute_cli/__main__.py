"""`python -m keras_distribute_cli`: the console script, where it is not on the path."""

import sys

from keras_distribute_cli import main

if __name__ == "__main__":
    sys.exit(main())
