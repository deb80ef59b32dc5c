"""`python -m keras_distribute.launch`."""

import sys

from keras_distribute.launch.command import main

sys.exit(main())
