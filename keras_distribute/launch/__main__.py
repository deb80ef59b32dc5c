"""`python -m keras_distribute.launch`."""

import sys

from keras_distribute.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
