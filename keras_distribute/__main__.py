"""`python -m keras_distribute`: the command line."""

import sys

from keras_distribute_cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m keras_distribute"))
