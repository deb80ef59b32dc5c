"""Where this package deliberately differs from TensorFlow, in a sentence each. Tests name the difference they rely on.

A test that meets a difference asserts what we do instead; it is never skipped.
"""

DIFFERENCES = {
    # Values
    "one replica": "With one replica `run` returns a PerReplica too; TensorFlow returns the bare value.",
    "always per replica": "Arrays returned by `run` are always PerReplica; TensorFlow's are bare if one object.",
    "no 64-bit": "MEAN of integers is float32, for one replica too; TensorFlow gives float64, or that one integer.",
    "numbers become arrays": "Python numbers become arrays when distributed or reduced; TensorFlow keeps some.",
    "traced replica id": "The replica id is a traced integer in `run`; TensorFlow's is a Python number per replica.",
    "one shape": "`run` is one program, so an array has one shape on all replicas; TensorFlow runs each by itself.",
    "values in run": "Values are distributed outside `run`; TensorFlow lets each replica distribute values to all.",
    # Collectives
    "negative axes": "Axes may count from the end in `gather` and `all_gather`; TensorFlow fails.",
    "axes in a list": "`reduce` takes its axes as a list too; TensorFlow only as a tuple.",
    "mixed dtypes": "Floats and integers reduce together; TensorFlow refuses the mixture on CPUs.",
    "booleans": "Booleans are counted, as integers; TensorFlow cannot reduce them.",
    "none": "None is a structure without values, and reduces to None; TensorFlow refuses its sum.",
    "common values": "The sum of a value that is no PerReplica is refused; TensorFlow multiplies it if there are axes.",
    "gathered structures": "`gather` joins each value of a structure; TensorFlow returns the first replica's.",
    "updates are one program": "An update runs once for all replicas, so a result inside it is of all of them.",
    "merge_call is traced": "`merge_call` is part of the program, so it cannot pick the components of one replica.",
    "nothing to reduce": "`batch_reduce_to` of nothing is nothing; TensorFlow fails by accident.",
    "no single destination": "`reduce_to` gives the value on every replica; TensorFlow on the given device only.",
    # Variables
    "none aggregation": "A mirrored variable without aggregation takes equal values only; TensorFlow's drift.",
    "sum assigned": "An on-read sum holds what it is given across replicas on its first replica; TensorFlow splits it.",
    "sum initial": "The initial value of an on-read sum is on its first replica; TensorFlow puts it on each.",
    "sum added": "Adding across replicas to an on-read sum is allowed; TensorFlow refuses.",
    "creation in run": "A variable is created outside `run`; TensorFlow creates one per replica where it can.",
    "python numbers": "Python numbers are assigned in `run` like arrays; TensorFlow fails where they are aggregated.",
    "no component objects": "The components of a variable are plain arrays; TensorFlow's know their container.",
    # Training
    "keras 3 metrics": "`metric.result()` in `run` is of this replica's data; that of tf_keras is of all replicas'.",
    # Errors
    "op errors": "Where TensorFlow raises its own op errors or bare assertions, ours are a ValueError or a TypeError.",
    "keras errors": "What Keras 3 checks by itself raises Keras's message.",
    "refused early": "Devices, options, axes and the order of scopes are checked at once; TensorFlow accepts them.",
    "one device name": "A single device name stands for a list of one; TensorFlow reads it letter by letter.",
}


def because(name: str) -> str:
    """The reason of a difference, which must be in the table."""
    return DIFFERENCES[name]
