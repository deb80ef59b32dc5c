"""What trackers and Keras's own callbacks write in a training of two processes: each
number once, and as the history has it. The program is that of docs/guide/trackers.md.
"""

import csv
import http.server
import importlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.callbacks import ray_report
from tests.support import without_what_is_not_named

pytestmark = pytest.mark.timeout(240)
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/trackers.md").read_text()
PROGRAM, COMMAND = re.findall(
    r"^```(?:py title=\"train.py\"|shell)\n(.*?)^```", PAGE, re.M | re.S
)[:2]
HISTORY = """
import json
import pathlib

text = json.dumps([history.history, model.evaluate(x, y, verbose=0)])
pathlib.Path(f"history-{kd.process_index()}.json").write_text(text)
"""


def without_trackers(program):
    """The page's program with what Keras brings."""
    lines = program.splitlines(keepends=True)
    kept = [line for line in lines if not re.match("import (mlflow|wandb)", line)]
    text = "".join(kept)
    text = re.sub(r"(?ms)^if kd.is_chief\(\):.*?(?=^\S)", "", text, count=1)
    return text[: text.index("if kd.is_chief")]


def trained(folder, program, environment=None):
    """Runs a program, and returns the history of both processes, which is one."""
    program = program.replace("model.fit(", "history = model.fit(", 1)
    (folder / "train.py").write_text(program + HISTORY)
    python, *command = COMMAND.split()
    assert python == "python"
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ
        | without_what_is_not_named("tensorflow")
        | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
        | (environment or {}),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = [(folder / f"history-{number}.json").read_text() for number in range(2)]
    assert said[0] == said[1]
    return json.loads(said[0])


class Monitor:
    """A server that notes what `RemoteMonitor` sends."""

    def __enter__(self):
        self.received = received = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                size = int(self.headers["Content-Length"])
                received.append(json.loads(self.rfile.read(size)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def assert_scalars(folder, history):
    """One file of events, with each epoch once."""
    processing = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = importlib.import_module(processing).EventAccumulator
    tensors = importlib.import_module("tensorboard.util.tensor_util")
    for kind, prefix in (("train", ""), ("validation", "val_")):
        files = list((folder / kind).iterdir())
        assert len(files) == 1, files
        events = accumulator(str(files[0]))
        events.Reload()
        written = [
            (event.step, tensors.make_ndarray(event.tensor_proto).item())
            for event in events.Tensors("epoch_loss")
        ]
        losses = [pytest.approx(loss) for loss in history[f"{prefix}loss"]]
        assert written == list(enumerate(losses))


def test_callbacks_of_keras_write_once(tmp_path):
    pytest.importorskip("tensorflow", reason="TensorBoard of Keras needs it")
    with Monitor() as monitor:
        sends = f'keras.callbacks.RemoteMonitor("{monitor.root}", send_as_json=True),'
        program = without_trackers(PROGRAM)
        assert "CSVLogger" in program and "wandb" not in program
        program = program.replace("callbacks = [", f"callbacks = [{sends} ", 1)
        history, evaluated = trained(tmp_path, program)
    with (tmp_path / "log.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    epochs = [
        {name: values[epoch] for name, values in history.items()} for epoch in range(4)
    ]
    numbered = [{"epoch": epoch, **logs} for epoch, logs in enumerate(epochs)]
    assert rows == numbered
    assert monitor.received == numbered
    assert_scalars(tmp_path / "tensorboard", history)
    import keras

    model = keras.models.load_model(tmp_path / "best.keras")
    assert model.optimizer.iterations == 80
    x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
    again = model.evaluate(x, x.sum(axis=1, keepdims=True), verbose=0)
    assert again == pytest.approx(evaluated, rel=1e-5)


def offline_records(file):
    """What W&B has written: records in the format of LevelDB's log."""
    data, block = file.read_bytes(), 2**15
    assert data[:4] == b":W&B"
    place, parts = 7, []
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # All of a record, or its last part.
            yield b"".join(parts)
            parts = []


def logged_offline(folder):
    """What was logged to the one run of W&B, in order."""
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    for data in offline_records(file):
        record = protocol.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in items
            }


@pytest.mark.parametrize("store", ["sqlite:///mlflow.db", "file:mlruns"])
def test_the_program_of_the_page_logs_each_number_once(tmp_path, store, monkeypatch):
    reason = "needs pip install wandb mlflow tensorflow-cpu tensorboard"
    for name in ("wandb", "mlflow", "tensorflow"):
        pytest.importorskip(name, reason=reason)
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants a database.
    monkeypatch.chdir(tmp_path)
    history, _ = trained(tmp_path, PROGRAM.replace("sqlite:///mlflow.db", store))
    for name, values in history.items():
        logged = [row[name] for row in logged_offline(tmp_path)]
        assert logged == values
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    found = client.get_metric_history(run.info.run_id, "val_loss")
    assert [metric.value for metric in found] == history["val_loss"]
    assert_scalars(tmp_path / "tensorboard", history)


def test_the_callback_of_wandb_sees_each_step_in_the_chief(tmp_path):
    for name in ("wandb", "tensorflow", "mlflow"):
        pytest.importorskip(name)
    own = "WandbMetricsLogger(log_freq='batch')"
    program = "from wandb.integration.keras import WandbMetricsLogger\n"
    program = PROGRAM.replace("import wandb\n", f"import wandb\n{program}", 1)
    program = program.replace("[on_wandb,", f"[{own},", 1)
    history, _ = trained(tmp_path, program)
    rows = list(logged_offline(tmp_path))
    losses = [row["batch/loss"] for row in rows if "batch/loss" in row]
    assert len(losses) == 80
    assert losses[19::20] == pytest.approx(history["loss"])
    epochs = [row["epoch/val_loss"] for row in rows if "epoch/val_loss" in row]
    assert epochs == pytest.approx(history["val_loss"])


def test_ray_is_told_metrics_that_are_vectors(monkeypatch):
    """Such as `F1Score`, which has a number for each class."""
    reports = []

    class Train:
        def report(self, metrics, checkpoint):
            reports.append(metrics)

    monkeypatch.setattr(ray_report, "_ray_train", Train)
    logs = {"loss": np.float32(0.5), "f1_score": np.array([0.5, 1.0], "float32")}
    kd.callbacks.RayReport(save_model=False).on_epoch_end(0, logs)
    assert reports == [{"loss": 0.5, "f1_score": [0.5, 1.0], "epoch": 1}]
