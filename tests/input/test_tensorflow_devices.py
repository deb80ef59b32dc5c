"""TensorFlow is kept off the accelerators, whenever it is imported; a stand-in shows
what it is told.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

STAND_IN = """
    class config:
        hidden, started = [], {started}

        @classmethod
        def set_visible_devices(cls, devices, kind):
            if cls.started:
                raise RuntimeError("Visible devices cannot be modified after being initialized")
            cls.hidden.append((devices, kind))

        @classmethod
        def list_logical_devices(cls, kind):
            return ["GPU:0"] if kind == "GPU" else []
"""


def run(folder: Any, code: str, started: bool = False, **environment: str) -> Any:
    package = folder / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(STAND_IN).format(started=started)
    )
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": path, **environment},
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", ["keras_distribute", "tensorflow"])
def test_devices_are_hidden(first: str, tmp_path: Any) -> None:
    second = {"keras_distribute": "tensorflow", "tensorflow": "keras_distribute"}[first]
    code = f"import {first}\nimport {second}\nimport tensorflow\nprint(tensorflow.config.hidden)"
    assert (
        run(tmp_path, code).stdout.strip().splitlines()[-1]
        == "[([], 'GPU'), ([], 'TPU')]"
    )


def test_a_look_for_it_changes_nothing(tmp_path: Any) -> None:
    code = """
        import keras_distribute
        import importlib.util
        assert importlib.util.find_spec("tensorflow") is not None
        import tensorflow
        print(tensorflow.config.hidden)
    """
    assert run(tmp_path, code).stdout.strip() == "[([], 'GPU'), ([], 'TPU')]"


def test_a_user_may_leave_them(tmp_path: Any) -> None:
    code = "import keras_distribute, tensorflow\nprint(tensorflow.config.hidden)"
    assert run(tmp_path, code, KERAS_DISTRIBUTE_TF_DEVICES="1").stdout.strip() == "[]"


def test_a_stand_in_without_devices_is_imported(tmp_path: Any) -> None:
    code = """
        import os
        import keras_distribute
        folder = os.environ["FOLDER"]
        os.rename(f"{folder}/tensorflow/__init__.py", f"{folder}/tensorflow/true.py")
        open(f"{folder}/tensorflow/__init__.py", "w").close()
        import tensorflow
        assert tensorflow.__file__.startswith(folder)
        # The true one may come later.
        import sys
        del sys.modules["tensorflow"]
        os.rename(f"{folder}/tensorflow/true.py", f"{folder}/tensorflow/__init__.py")
        import tensorflow
        print(tensorflow.config.hidden)
    """
    found = run(tmp_path, code, FOLDER=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert found.stdout.strip() == "[([], 'GPU'), ([], 'TPU')]"


def test_too_late_is_said(tmp_path: Any) -> None:
    done = run(tmp_path, "import tensorflow\nimport keras_distribute", started=True)
    assert "TensorFlow has taken the GPUs that JAX needs" in done.stderr
    assert "Import keras_distribute first" in done.stderr and "TPUs" not in done.stderr


def test_uninstalling_leaves_the_import_system_as_it_was(tmp_path: Any) -> None:
    code = """
        import sys
        before = list(sys.meta_path)
        import keras
        between = list(sys.meta_path)
        from keras_distribute.training import install
        assert len(sys.meta_path) == len(between) + 1
        install.uninstall()
        assert sys.meta_path == between
    """
    run(tmp_path, code)


def test_the_real_one(tmp_path: Any) -> None:
    pytest.importorskip("tensorflow")
    code = "import keras_distribute, tensorflow as tf\nprint(tf.config.get_visible_devices())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CPU" in done.stdout and "GPU" not in done.stdout
