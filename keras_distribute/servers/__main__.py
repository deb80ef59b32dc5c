"""`python -m keras_distribute.servers`: the task that `TF_CONFIG` names."""

from keras_distribute.cluster.resolvers.tf_config import TFConfigClusterResolver
from keras_distribute.servers.server import Server

if __name__ == "__main__":
    resolver = TFConfigClusterResolver()
    Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
