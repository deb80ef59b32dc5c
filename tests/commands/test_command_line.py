"""The command `keras-distribute`, as a user starts it."""

import importlib
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import keras_distribute_cli
from keras_distribute import config
from keras_distribute.commands import check, env, facts, numbers, waiting
from keras_distribute.launch.command import main as launch
from keras_distribute.summary.formats import as_text

pytestmark = pytest.mark.timeout(120)
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/command-line.md").read_text()


def environment(**variables):
    """Without what the tests' own devices need, and tests' clusters."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERAS_DISTRIBUT", "SLURM", "JAX_NUM"))
        and name != "NPROC"
    }
    light = {"TESTS_WITHOUT": "sklearn matplotlib tensorflow IPython"}
    return clean | {"JAX_PLATFORMS": "cpu", "COLUMNS": "80"} | light | variables


def ran(code):
    """What came of a program."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment(),
    )


def command(*arguments, module="keras_distribute_cli", seconds=100, **variables):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env=environment(**variables),
    )


def shown_on_page(line):
    """What the page shows below a command."""
    block = re.search(rf"```console\n\$ {re.escape(line)}\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None, line
    return block[1]


def test_help_is_that_of_the_page_and_needs_neither_keras_nor_jax():
    done = command("--help", seconds=20)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == shown_on_page("keras-distribute --help")
    code = (
        "import sys, keras_distribute_cli; keras_distribute_cli.main(['--help']);"
        "sys.exit(len({'keras', 'jax', 'keras_distribute'} & sys.modules.keys()))"
    )
    alone = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, timeout=20
    )
    assert alone.returncode == 0, alone.stderr


def test_no_command_and_no_such_command():
    assert command(seconds=20).returncode == 2
    done = command("lunch", seconds=20)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: there is no command 'lunch'.\n"
        "  Did you mean 'launch'?\n"
        "  Commands: env, test, launch, dry-run, replay. For help: keras-distribute --help\n"
    )
    assert "Did you mean" not in command("xyz", seconds=20).stderr


def test_the_version_and_the_console_script():
    assert command("--version", seconds=20).stdout == "keras-distribute 0.1.0\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["keras-distribute"].partition(":")
    assert getattr(importlib.import_module(module), name) is keras_distribute_cli.main
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert module in packages
    for each in keras_distribute_cli.COMMANDS.values():
        assert callable(importlib.import_module(each.module).main)


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_colours_are_for_terminals(variables):
    reader, writer = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "keras_distribute_cli", "--help"],
        stdout=writer,
        timeout=20,
        cwd=ROOT,
        env=environment(TERM="xterm-256color", **variables),
        check=True,
    )
    os.close(writer)
    shown = os.read(reader, 100_000).decode()
    os.close(reader)
    assert ("\x1b[1;32mUsage:" in shown) == (not variables)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n")
    assert plain == shown_on_page("keras-distribute --help")


def test_a_backend_that_cannot_work():
    done = command("env", KERAS_BACKEND="torch")
    assert done.returncode == 1
    assert done.stderr.startswith("error: keras_distribute needs Keras on JAX.\n")
    assert "Received: the 'torch' backend in KERAS_BACKEND." in done.stderr


def test_env_as_text_and_as_json():
    secrets = {
        "KERAS_DISTRIBUTE_JOB_TOKEN": "5ecret" * 8,
        "RAY_AUTH": "5ecret",
        "JAX_PROXY": "http://user:5ecret@host:80",
        "RAY_JOB_CONFIG_JSON": '{"runtime_env": {"env_vars": {"HF_TOKEN": "5ecret"}}}',
        "SM_USER_ARGS": '["--wandb-api-key", "5ecret"]',
        "SM_HPS": '{"epochs": 3}',
        "UNRELATED": "5ecret",
    }
    cluster = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.255.255.1:1234",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "4",
        "KERAS_DISTRIBUTION_PROCESS_ID": "3",
    }
    # Nobody answers at that address, and nobody is asked.
    done = command("env", "--json", JAX_NUM_CPU_DEVICES="3", **secrets, **cluster)
    assert done.returncode == 0, done.stderr
    assert "5ecret" not in done.stdout
    found = json.loads(done.stdout)
    assert list(found) == [
        "versions",
        "devices",
        "host",
        "thread_pool",
        "cluster",
        "strategy",
        "environment",
    ]
    assert {"python", "os", "keras", "jax", "jaxlib", "numpy"} <= (
        found["versions"]["installed"].keys()
    )
    assert [each["name"] for each in found["devices"]["local"]] == [
        "cpu:0",
        "cpu:1",
        "cpu:2",
    ]
    assert found["thread_pool"]["set_by"] == "keras_distribute, for 3 CPU devices"
    assert found["thread_pool"]["threads"] >= 12
    assert found["cluster"] == {
        "resolver": "KerasClusterResolver",
        "task": "worker:3",
        "tasks": {"worker": 1},
        "process_id": 3,
        "num_processes": 4,
        "coordinator": "10.255.255.1:1234",
        "problem": None,
    }
    assert found["strategy"] == "kd.MultiWorkerMirroredStrategy()"
    variables = found["environment"]
    assert variables["KERAS_DISTRIBUTE_JOB_TOKEN"] == facts.HIDDEN
    for name in ("RAY_AUTH", "RAY_JOB_CONFIG_JSON", "SM_USER_ARGS"):
        assert variables[name] == facts.HIDDEN
    assert variables["SM_HPS"] == '{"epochs": 3}'
    assert variables["JAX_PROXY"] == "http://...@host:80"
    assert "UNRELATED" not in variables
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in variables
    text = as_text("env", [], env.tables(found))
    for line in (
        r"cpu:2 +cpu +not known +not known",
        r"resolver +KerasClusterResolver",
        r"process +3 of 4 that train together",
        r"KERAS_DISTRIBUTE_JOB_TOKEN +\(set, not shown\)",
    ):
        assert re.search(line, text), line


def test_env_is_that_of_the_page():
    """Its parts, and what it says of a machine; the numbers are each machine's own."""
    done = command("env", JAX_NUM_CPU_DEVICES="4")
    assert done.returncode == 0, done.stderr

    def parts(text):
        lines = [line.rstrip() for line in text.splitlines()]
        return [
            re.split(r"  +", line.strip())[0]
            for i, line in enumerate(lines)
            if (line and not line.startswith(" ")) or "cpu:" in line
        ]

    assert parts(done.stdout) == parts(
        shown_on_page("JAX_NUM_CPU_DEVICES=4 keras-distribute env")
    )


@pytest.mark.parametrize("what", ["automatic_resolver", "jax.local_devices"])
def test_env_does_not_wait_for_what_does_not_answer(what):
    code = (
        "import sys, threading; from keras_distribute.commands import env, facts;"
        f"facts.{what} = lambda: threading.Event().wait();"
        "sys.exit(env.main(['--timeout', '1']))"
    )
    done = ran(code)
    assert done.returncode == 1, done.stderr
    assert "no answer within 1 seconds" in done.stdout
    assert "Traceback" not in done.stderr
    assert "not known before the problem is solved" in done.stdout
    assert "environment" in done.stdout.splitlines()


def test_env_shows_a_cluster_that_makes_no_sense():
    done = command("env", TF_CONFIG='{"cluster"')
    assert done.returncode == 1
    assert "ClusterError: TF_CONFIG is not JSON" in done.stdout
    assert "Fix: check TF_CONFIG." in done.stdout


def test_env_of_parameter_servers():
    jobs = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}
    task = {"type": "ps", "index": 0}
    done = command("env", TF_CONFIG=json.dumps({"cluster": jobs, "task": task}))
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        r"tasks +1 chief, 2 worker, 1 ps\n",
        r"this task +ps:0\n",
        r"strategy +kd.ParameterServerStrategy\(resolver\) in the chief, python -m "
        r"keras_distribute.servers elsewhere",
    ):
        assert re.search(line, done.stdout), line


def test_an_answer_is_a_value_or_a_problem():
    assert waiting.ask(lambda: 3, 5.0) == (3, None, False)

    def fails():
        raise OSError("no network")

    assert waiting.ask(fails, 5.0) == (None, "OSError: no network", False)


def test_what_sets_the_thread_pool(monkeypatch):
    chosen = config._Chosen()
    monkeypatch.setattr(config, "_chosen", chosen)
    monkeypatch.setenv(config.SET_HERE, "")
    assert config.pool()[1] == "the JAX that was started before this package"
    monkeypatch.setenv("NPROC", "4096")
    config._size_pool(2)
    assert config.pool() == (4096, "NPROC in the environment")
    chosen.pool_size = 0
    monkeypatch.setenv("NPROC", "1")  # XLA takes it, however many cores there are.
    config._size_pool(1)
    assert config.pool() == (1, "NPROC in the environment")
    config._size_pool(2)
    assert config.pool() == (8, "keras_distribute, for 2 CPU devices")
    chosen.pool_size = 0
    monkeypatch.setenv("NPROC", "")
    config._size_pool(500)
    assert config.pool() == (2000, "keras_distribute, for 500 CPU devices")
    in_a_child = config._Chosen()
    monkeypatch.setattr(config, "_chosen", in_a_child)
    config._size_pool(1)
    assert config.pool() == (config.cores(), "the number of cores")
    assert "NPROC" not in os.environ


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_strategy_passes_and_the_page_shows_it():
    done = command("test", "--cpu-devices", "4", seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr

    def without_numbers(text):
        text = re.sub(r"\d[\d.e-]*|─+", "#", text)
        return [" ".join(line.split()) for line in text.splitlines() if line.strip()]

    shown = shown_on_page("keras-distribute test --cpu-devices 4")
    assert without_numbers(done.stdout) == without_numbers(shown)
    assert done.stdout.count("passed") == len(check.TRIALS) + 1


def trial(found):
    return lambda: (found, 2, "")


def test_strategies_that_fail_and_that_cannot_run(monkeypatch, capsys):
    right = {"losses": np.ones(3), "weights": np.zeros(2)}

    def raises():
        raise ValueError("a step failed\nwith more lines")

    def cannot():
        raise check._CannotRunError("it needs several devices: try --cpu-devices 4")

    trials = {
        "Right": trial(right),
        "Near": trial(right | {"losses": np.ones(3) + 1e-6}),
        "Wrong": trial(right | {"losses": np.ones(3) + 0.01}),
        "NaN": trial(right | {"losses": np.full(3, np.nan)}),
        "Later": trial(right | {"weights": np.array([np.nan, 0.0])}),
        "Raises": raises,
        "Cannot": cannot,
    }
    monkeypatch.setattr(check, "TRIALS", trials)
    monkeypatch.setattr(numbers, "of_training", lambda _: right)
    assert check.main([]) == 1
    lines = {
        line.split()[0]: " ".join(line.split())
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    }
    assert lines["Right"] == "Right 2 passed 0e+00 0.0"
    assert lines["Near"] == "Near 2 passed 1e-06 0.0"
    assert lines["Wrong"] == "Wrong 2 FAILED 1e-02 0.0 differs by more than 1e-04"
    assert lines["NaN"] == "NaN 2 FAILED nan 0.0 differs by more than 1e-04"
    assert lines["Later"] == lines["NaN"].replace("NaN", "Later", 1)
    assert lines["Raises"] == "Raises FAILED 0.0 ValueError: a step failed"
    assert lines["Cannot"] == (
        "Cannot not run 0.0 it needs several devices: try --cpu-devices 4"
    )
    monkeypatch.setattr(check, "TRIALS", {"Right": trials["Right"], "Cannot": cannot})
    assert check.main([]) == 0
    assert "1 passed, 0 failed, of 2." in capsys.readouterr().out


def test_one_device_alone_and_an_extra_that_is_missing(monkeypatch):
    monkeypatch.setattr(check.jax, "local_devices", lambda: ["one"])
    for name in ("MirroredStrategy", "CentralStorageStrategy"):
        outcome = check._outcome(name, check.TRIALS[name], {})
        assert (outcome.result, outcome.note) == (
            check.SKIPPED,
            f"{name} needs several devices: try --cpu-devices 4",
        )
    monkeypatch.setitem(sys.modules, "zmq", None)
    name = "ParameterServerStrategy"
    outcome = check._outcome(name, check.TRIALS[name], {})
    assert outcome.result == check.SKIPPED, outcome
    assert "pip install" in outcome.note or "parameter" in outcome.note.lower()


@pytest.mark.parametrize(
    "arguments", [["--cpu-devices", "0"], ["--timeout", "0"], ["--unknown"]]
)
def test_wrong_options_of_test(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        check.main(arguments)
    assert caught.value.code == 2
    assert arguments[0].removeprefix("--") in capsys.readouterr().err


def test_what_hangs_is_shown_and_ended():
    code = (
        "import sys, threading; from keras_distribute.commands import check, numbers;"
        "numbers.of_training = lambda _: threading.Event().wait();"
        "check.main(['--timeout', '1'])"
    )
    done = ran(code)
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr and "of_training" not in done.stdout


def test_launch_is_the_launcher(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print(os.environ['KERAS_DISTRIBUTION_PROCESS_ID'], *sys.argv[1:])\n"
        "sys.exit(3 * ('fail' in sys.argv))\n"
    )
    given = ["--nproc", "2", "--cpu-devices", "1", str(script)]
    done = command("launch", *given, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 --epochs 2", "[1] 1 --epochs 2"]
    assert command("launch", *given, "fail").returncode == 3
    with pytest.raises(SystemExit):
        launch(["--help"], "keras-distribute launch")
    assert capsys.readouterr().out.startswith("usage: keras-distribute launch [-h]")


def test_dry_run_is_the_dry_run(tmp_path):
    (tmp_path / "train.py").write_text(
        "import keras\n\n\ndef build():\n"
        "    layers = [keras.Input((8,)), keras.layers.Dense(1)]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
    )
    given = ["--model", "train:build", "--batch", "16", "--topology", "cpu:2"]
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = command("dry-run", *given, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Dry run: batch 16 on cpu:2")
    small = command(
        "dry-run",
        *given,
        "--memory-limit",
        "10",
        module="keras_distribute",
        PYTHONPATH=path,
    )
    assert small.returncode == 1, small.stderr
    missing = command("dry-run", module="keras_distribute")
    assert missing.returncode == 2
    assert "usage: python -m keras_distribute dry-run [-h]" in missing.stderr
