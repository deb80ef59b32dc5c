"""A Slurm of several nodes on this machine: munged, slurmctld, and a slurmd for each
node, in a temporary folder, as the user who calls. Nothing of the machine is changed.
"""

import contextlib
import getpass
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import time

from keras_distribute.cluster.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=1
KillWait=30
SlurmdTimeout=20
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 "
    "Gres=gpu:{gpus} State=UNKNOWN"
)


def path() -> str:
    """Where programs are looked for now, a daemon's too."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])


def missing() -> list[str]:
    """The programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name, path=path())]


def wait(condition, what: str, seconds: float = 60.0):
    """Returns the first true value of `condition()`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
    return found


class SlurmCluster:
    """Nodes with CPUs and GPUs that are not there; a `with` block ends all of it."""

    def __init__(
        self, folder: pathlib.Path, nodes: int = 2, cpus: int = 4, gpus: int = 4
    ):
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        controller, *ports = free_ports(1 + nodes)
        host = socket.gethostname().partition(".")[0]
        for name in ("munge", "state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir(mode=0o755)
        devices = [folder / f"nvidia{number}" for number in range(gpus)]
        for device in devices:
            device.symlink_to(os.devnull)
        named = zip(self.nodes, ports, strict=True)
        text = CONFIGURATION.format(
            host=host,
            port=controller,
            user=getpass.getuser(),
            folder=folder,
            nodes="\n".join(
                NODE.format(name=name, host=host, port=port, cpus=cpus, gpus=gpus)
                for name, port in named
            ),
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(
            "".join(
                f"Name=gpu Flags=nvidia_gpu_env File={device}\n" for device in devices
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "PMI"))
        } | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path()}
        self._services: dict[str, subprocess.Popen] = {}

    def __enter__(self):
        munge = self.folder / "munge"
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        options = [f"--{name}={munge / name.partition('-')[0]}" for name in files]
        self._start("munged", "--foreground", "--force", *options)
        try:
            wait((munge / "socket").exists, "munged")
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            wait(lambda: self.states() == {"idle"}, "the nodes", 90)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if "slurmctld" in self._services:
            self._end_jobs()
        for service in reversed(self._services.values()):
            if service.poll() is None:
                service.terminate()
        for service in self._services.values():
            try:
                service.wait(15)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()

    def _end_jobs(self):
        """Kills what runs, and waits until nothing of it is left."""
        user = getpass.getuser()
        self.run("scancel", "--full", "--signal=KILL", "--user", user)
        self.run("scancel", "--user", user)
        with contextlib.suppress(TimeoutError):
            wait(lambda: not self.run("squeue", "-h").strip(), "the end of jobs", 30)

    def _start(self, name, *arguments, key=None):
        key = key or name
        with open(self.folder / f"{key}.out", "ab") as log:
            self._services[key] = subprocess.Popen(
                [shutil.which(name, path=self.environment["PATH"]), *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start_node(self, node):
        """Starts the slurmd of a node."""
        self._start("slurmd", "-D", "-N", node, key=node)

    def run(self, *command, cwd=None):
        """What a command of Slurm has written; an error has its text."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=cwd,
        )
        return done.stdout + done.stderr

    def states(self):
        """The states of the nodes."""
        return set(self.run("sinfo", "-h", "-N", "-o", "%T").split())

    def steps_on(self, node: str, number: str) -> int:
        """How many steps of a job run on a node, as the node itself knows."""
        log = (self.folder / f"slurmd-{node}.log").read_text()
        started = log.count(f"launch task StepId={number}.")
        return started - len(re.findall(rf"\[{number}\.\d+\] done with job", log))

    def submit(self, file: pathlib.Path, *options: str) -> str:
        """The number of the job that `sbatch` makes of a batch file, in its folder."""
        said = self.run("sbatch", *options, file.name, cwd=file.parent)
        number = re.fullmatch(r"Submitted batch job (\d+)", said.strip())
        assert number is not None, said
        return number[1]

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        said = self.run("scontrol", "show", "job", "-o", number)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def end_of(self, number: str, seconds: float = 120.0) -> dict[str, str]:
        """What Slurm says of a job that has ended."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait(
            lambda: self.job(number).get("JobState") in over,
            f"the end of job {number}",
            seconds,
        )
        return self.job(number)
