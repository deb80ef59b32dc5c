"""Where this package deliberately differs from TensorFlow, in a sentence each. Tests
name the difference they rely on.

A test that meets a difference asserts what we do instead; it is never skipped.
"""

DIFFERENCES = {
    # Values
    "one replica": "With one replica `run` returns a PerReplica too; TensorFlow returns the bare value.",
    "always per replica": "Arrays returned by `run` are always PerReplica; TensorFlow's are bare if one object.",
    "no 64-bit": "MEAN of integers is float32, for one replica too; TensorFlow gives float64, or that one integer.",
    "numbers become arrays": "Python numbers become arrays when distributed or reduced; TensorFlow keeps some.",
    "traced replica id": "The replica id is a traced integer in `run`; TensorFlow's is a Python number per replica.",
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
    "ragged average loss": "The default global batch size counts the rows of all replicas; TensorFlow multiplies one's.",
    "keras 3 metrics": "`metric.result()` in `run` is of this replica's data; that of tf_keras is of all replicas'.",
    # Input
    "elements of one replica": "Elements are PerReplica with one replica too; TensorFlow gives the bare tensors.",
    "32-bit elements": "Elements on devices are in 32 bits, like all of JAX; TensorFlow keeps 64.",
    "none in elements": "None in an element stays None; TensorFlow gives a PerReplica of Nones, and fails at the end.",
    "every kind": "Every kind of dataset that `fit` takes can be distributed; TensorFlow takes tf.data alone.",
    "policies on one process": "One process splits each batch by one rule; TensorFlow has two, by the policy.",
    "order of processes": "A process keeps consecutive rows of a global batch; TensorFlow deals pieces in turn.",
    "too few files": "AUTO goes by data where there are fewer files than processes; TensorFlow fails and hangs.",
    "own ends": "A process played alone ends with its data; TensorFlow's gets empty elements until all have ended.",
    "incomplete rounds": "Replicas for which no batch is left get no rows; TensorFlow drops a static round.",
    "elements without rows": "Elements of scalars alone are refused where a replica is left without; TensorFlow drops them.",
    "scalars beside rows": "A scalar beside rows is every replica's; TensorFlow refuses it, or makes it zero.",
    "empty shapes": "A component without rows has the other dimensions of the rest; TensorFlow's unknown ones are 0.",
    "one number of rows": "The arrays of an element have the same rows; TensorFlow splits each by its own.",
    "ragged tensors": "Ragged tensors are filled up with zeros, as Keras does; TensorFlow keeps them ragged.",
    "sparse tensors": "Sparse tensors cannot be split; TensorFlow does, but fails where a replica gets no rows.",
    "datasets in elements": "Datasets in elements are refused; TensorFlow hands them on with one replica.",
    "static specs": "The rows of an `element_spec` are None; TensorFlow's are a number where all replicas have it.",
    "lengths": "`len` counts the steps, where they are known; TensorFlow has a `cardinality`, of batches, often unknown.",
    "not a dataset": "What is no dataset, and a bad value, is our error; TensorFlow fails on a missing attribute.",
    "iterating in run": "Reading data in `run` is a ContextError; TensorFlow's is a ValueError.",
    "options of our own": "InputOptions are named, two steps are ready, and pipelines stay on the host.",
    "contexts compare": "InputContexts with the same numbers are equal; TensorFlow's are themselves only.",
    "replicas of workers": "PER_REPLICA works on several workers too; TensorFlow refuses.",
    # Clusters
    "a place for every process": "A task without a place among the workers is an error at once; TensorFlow counts on.",
    "a cluster of one": "Without a cluster a process is the only one, and its chief; TensorFlow's rules fail.",
    "tpu protocol": "A TPU's resolver has a protocol, grpc; TensorFlow's fails on the missing attribute.",
    "slurm without gpus": "Slurm's nodes may have no GPUs; TensorFlow fails.",
    "slurm's order": "Tasks are numbered in the order of Slurm's node list; TensorFlow sorts the names of the nodes.",
    "a job without tasks": "A job without tasks has no addresses; TensorFlow fails.",
    # Errors
    "op errors": "Where TensorFlow raises its own op errors or bare assertions, ours are a ValueError or a TypeError.",
    "keras errors": "What Keras 3 checks by itself raises Keras's message.",
    "refused early": "Devices, options, axes and the order of scopes are checked at once; TensorFlow accepts them.",
    "one device name": "A single device name stands for a list of one; TensorFlow reads it letter by letter.",
}


def because(name: str) -> str:
    """The reason of a difference, which must be in the table."""
    return DIFFERENCES[name]
