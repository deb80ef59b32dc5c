"""Where the chips of a TPU are, and which of them make up a replica. Knows no
strategies.
"""

from keras_distribute.tpu import experimental as experimental

__all__ = ["experimental"]
