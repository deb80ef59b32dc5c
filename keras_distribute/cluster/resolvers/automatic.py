"""The resolver for a user who names none, by the environment or what runs already."""

from __future__ import annotations

import os

import jax

from keras_distribute.cluster.resolvers import environment
from keras_distribute.cluster.resolvers.base import (
    ClusterResolver,
    SimpleClusterResolver,
)
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.google_cloud import (
    TPUClusterResolver,
    hosts_of_environment,
)
from keras_distribute.cluster.resolvers.launched import KerasClusterResolver
from keras_distribute.cluster.resolvers.mpi import (
    MPICHClusterResolver,
    OpenMPIClusterResolver,
)
from keras_distribute.cluster.resolvers.ray_train import (
    RayTrainClusterResolver,
    trains_in_ray,
)
from keras_distribute.cluster.resolvers.running import JaxClusterResolver
from keras_distribute.cluster.resolvers.slurm import SlurmClusterResolver
from keras_distribute.cluster.resolvers.tf_config import (
    SageMakerClusterResolver,
    TFConfigClusterResolver,
)


def automatic_resolver() -> ClusterResolver:
    """The resolver for the environment of this process; the innermost launcher wins.

    1. `KERAS_DISTRIBUTION_JOB_ADDRESSES` (our launcher, or the user):
       `KerasClusterResolver`.
    2. `TF_CONFIG`, unless it is empty: `TFConfigClusterResolver`.
    3. A function that Ray Train runs: `RayTrainClusterResolver`.
    4. `OMPI_COMM_WORLD_SIZE` (Open MPI's `mpirun`): `OpenMPIClusterResolver`.
    5. `PMI_SIZE` and `MPI_LOCALNRANKS` (MPICH's `mpirun`): `MPICHClusterResolver`.
    6. `SLURM_STEP_NUM_TASKS` above 1 (`srun`; an allocation alone is no cluster):
       `SlurmClusterResolver`.
    7. `SM_HOSTS` (SageMaker): `SageMakerClusterResolver`.
    8. `TPU_WORKER_HOSTNAMES` with several hosts: `TPUClusterResolver`.
    9. JAX's runtime of several processes, where the program has started it:
       `JaxClusterResolver`.
    10. Otherwise this process is on its own.

    Returns:
        A resolver; its `topology()` may still say that there is one process.
    """
    variables = os.environ
    if variables.get("KERAS_DISTRIBUTION_JOB_ADDRESSES"):
        return KerasClusterResolver()
    if variables.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return TFConfigClusterResolver()
    if trains_in_ray():
        return RayTrainClusterResolver()
    if "OMPI_COMM_WORLD_SIZE" in variables:
        return OpenMPIClusterResolver()
    if {"PMI_SIZE", "MPI_LOCALNRANKS"} <= variables.keys():  # Not what srun sets.
        return MPICHClusterResolver()
    tasks = "SLURM_STEP_NUM_TASKS"
    if {"SLURM_PROCID", tasks} <= variables.keys() and environment.number(tasks) > 1:
        return SlurmClusterResolver()
    if variables.get("SM_HOSTS"):
        return SageMakerClusterResolver()
    hosts, slices = hosts_of_environment(), variables.get("MEGASCALE_NUM_SLICES", "1")
    if "," in hosts or (hosts and slices not in ("", "1")):
        return TPUClusterResolver()
    if jax.distributed.is_initialized():
        return JaxClusterResolver()
    return SimpleClusterResolver(ClusterSpec({}))
