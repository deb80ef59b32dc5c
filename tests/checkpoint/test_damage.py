"""Files that are missing, cut off or flipped, disks that are full: a clear error, never
another state.

`FUZZ_TRIES=500 python -m pytest tests/checkpoint/test_damage.py -k flipped` is the long
version.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import types
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from etils import epath

from keras_distribute.checkpoint import Checkpoint, CheckpointManager, storage
from keras_distribute.errors import (
    BackendError,
    CheckpointError,
    DamagedCheckpointError,
)

from . import interrupting
from .support import assert_same_bits, bits, scope

TRIES = int(os.environ.get("FUZZ_TRIES", "30"))


class Run:
    """Some state, and a folder with checkpoints of it: step `n` holds `n`."""

    def __init__(self, directory: pathlib.Path) -> None:
        random_numbers = np.random.default_rng(0)
        with scope(4):
            self.model = keras.Sequential(
                [
                    keras.Input((30,)),
                    keras.layers.Dense(40),
                    keras.layers.BatchNormalization(),
                ]
            )
            self.model.compile(keras.optimizers.Adam(), "mse")
            self.small = keras.Variable(random_numbers.normal(size=3))
            self.large = keras.Variable(random_numbers.normal(size=600_000))
        self.progress: dict[str, Any] = {}
        self.directory = directory
        self.checkpoint = Checkpoint(
            model=self.model, small=self.small, large=self.large, progress=self.progress
        )

    @property
    def state(self) -> dict[str, Any]:
        return bits(model=self.model, small=self.small, large=self.large)

    def set(self, step: int) -> None:
        self.small.assign(np.full(3, step))
        self.progress.update(
            step=step, blob=bytes([step % 256]) * 50, text=f"step {step}"
        )

    def manager(self, **options: Any) -> CheckpointManager:
        return CheckpointManager(self.checkpoint, self.directory, **options)


@pytest.fixture(scope="module")
def template(tmp_path_factory: Any) -> Run:
    run = Run(tmp_path_factory.mktemp("template"))
    with run.manager() as manager:
        for step in (1, 2, 3):
            run.set(step)
            manager.save(step)
    return run


@pytest.fixture
def run(template: Run, tmp_path: Any) -> Run:
    """The template with a copy of its files."""
    shutil.copytree(template.directory, tmp_path / "run")
    template.set(0)
    copy = Run.__new__(Run)
    copy.__dict__.update(vars(template), directory=tmp_path / "run")
    return copy


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_missing(run: Run) -> None:
    with pytest.raises(
        CheckpointError, match=r"There is no checkpoint at '.*/9'"
    ) as error:
        run.checkpoint.restore(run.directory / "9")
    assert "holds 1, 2, 3" in str(error.value)
    with pytest.raises(
        CheckpointError, match="There is no checkpoint at '/nowhere/at/all'"
    ):
        run.checkpoint.restore("/nowhere/at/all")


def test_empty_folder_and_a_file(run: Run) -> None:
    (run.directory / "empty").mkdir()
    (run.directory / "file").write_text("x")
    with pytest.raises(
        DamagedCheckpointError,
        match=r"(?s)empty' is no complete checkpoint.*nothing in it",
    ):
        run.checkpoint.restore(run.directory / "empty")
    with pytest.raises(
        DamagedCheckpointError, match="file' (is no complete checkpoint|cannot be read)"
    ):
        run.checkpoint.restore(run.directory / "file")


def test_each_file_missing_or_cut_off(run: Run) -> None:
    """Each file is deleted, emptied and halved in turn: an error that names the folder,
    or nothing was lost.
    """
    reference = None
    outcomes = []
    for path in files_of(run.directory / "3"):
        content = path.read_bytes()
        for kept in (None, 0, len(content) // 2):
            path.unlink() if kept is None else path.write_bytes(content[:kept])
            outcomes.append((path.name, kept, attempt(run, 3)))
            path.write_bytes(content)
            if reference is None:
                run.checkpoint.restore(run.directory / "3")
                reference = run.state
    refused = {name for name, _, outcome in outcomes if outcome}
    assert {"manifest.json", "manifest.ocdbt"} <= refused


def attempt(run: Run, step: int) -> bool:
    """Restores; whether that was refused. It must be refused clearly and change
    nothing, or give the right state.
    """
    run.set(0)
    before = run.state
    try:
        run.checkpoint.restore(run.directory / str(step))
    except DamagedCheckpointError as error:
        assert str(run.directory / str(step)) in str(error)
        assert "Fix: " in str(error)
        assert_same_bits(run.state, before)
        assert run.progress["step"] == 0
        return True
    np.testing.assert_array_equal(
        np.array(run.small.value), np.full(3, step, "float32")
    )
    assert run.progress == {
        "step": step,
        "blob": bytes([step]) * 50,
        "text": f"step {step}",
    }
    return False


def test_flipped_bytes(run: Run) -> None:
    """Bytes flipped in any file: refused, or harmless; never another state."""
    run.checkpoint.restore(run.directory / "3")
    right = run.state
    files = files_of(run.directory / "3")
    generator = random.Random(os.environ.get("FUZZ_SEED", "0"))
    refused = 0
    for number in range(TRIES):
        path = files[number % len(files)]
        content = path.read_bytes()
        broken = bytearray(content)
        for _ in range(generator.choice([1, 1, 1, 2, 8])):
            broken[generator.randrange(len(broken))] ^= generator.choice(
                [1 << generator.randrange(8), 255]
            )
        path.write_bytes(broken)
        if attempt(run, 3):
            refused += 1
        else:
            assert_same_bits(run.state, right)
        path.write_bytes(content)
    print(
        f"\n{TRIES} tries over {len(files)} files: {refused} refused, {TRIES - refused} harmless"
    )
    assert refused > TRIES // 4
    assert not attempt(run, 3)


def test_swapped_arrays(run: Run) -> None:
    """Files of another checkpoint of the same model are not this one's."""
    shutil.rmtree(run.directory / "3" / "arrays")
    shutil.copytree(run.directory / "2" / "arrays", run.directory / "3" / "arrays")
    with pytest.raises(
        DamagedCheckpointError,
        match=r"3' is damaged(?s:.*)manifest.ocdbt \(wrong checksum\)",
    ):
        run.checkpoint.restore(run.directory / "3")


def test_a_flipped_bit_in_an_array(run: Run) -> None:
    """The array store returns it as another number: the array's own checksum finds it,
    and names it.
    """
    path = max(files_of(run.directory / "3"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DamagedCheckpointError, match=r"1 array\(s\) are not what was saved: large\."
    ):
        run.checkpoint.restore(run.directory / "3")


def damage(directory: pathlib.Path) -> None:
    manifest = directory / "manifest" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])


def test_the_last_good_one_is_found(run: Run) -> None:
    damage(run.directory / "3")
    manager = run.manager()
    with pytest.raises(
        DamagedCheckpointError,
        match=r"3/manifest/manifest.json' is damaged(?s:.*)fallback=True",
    ):
        manager.restore()
    shutil.rmtree(run.directory / "2" / "arrays" / "d")
    with pytest.warns(
        UserWarning, match=r"(?s)Restored '.*/1', since later.*3/manifest.*2/arrays"
    ):
        status = manager.restore(fallback=True)
    assert status.step == 1 and run.progress["step"] == 1
    assert [pathlib.Path(path).name for path in status.damaged] == ["3", "2"]
    run.set(2)
    manager.save(2)  # Takes the place of the damaged one.
    manager.close()
    assert run.manager().restore(2).step == 2
    run.set(7)
    damage(run.directory / "1"), damage(run.directory / "2")
    with pytest.raises(
        DamagedCheckpointError,
        match=r"(?s)All 3 checkpoints in .* are damaged.*1/manifest.*Fix",
    ):
        run.manager().restore(fallback=True)
    assert run.progress["step"] == 7


def test_fallback_is_for_damage_only(run: Run) -> None:
    """An older checkpoint of another model does not fit either."""
    other = CheckpointManager(Checkpoint(v=keras.Variable(1.0)), run.directory)
    with pytest.raises(CheckpointError, match="is of something else"):
        other.restore(fallback=True)


def test_damage_does_not_stop_a_manager(run: Run) -> None:
    """Steps are listed, saved and deleted whatever is in the folders, and `keep_best`
    looks elsewhere.
    """
    for path in files_of(run.directory / "2"):
        path.write_bytes(b"\xff")
    with (
        run.manager(max_to_keep=1, keep_best=("loss", "min")) as manager,
        warnings.catch_warnings(),
    ):
        assert manager.all_steps() == [1, 2, 3]
        assert manager.best_step is None
        run.set(4)
        manager.save(4, metrics={"loss": 1.0})
        manager.wait()
        assert manager.all_steps() == [4]


NOT_STEPS = [
    *("030", "00", "３１", "3１", "٣", "²", "-5", "+41", " 40", "40 ", "40\n"),
    *("4_2", "45.0", "1e3", "0x2d", "44.bak", "step_43", "run_0030", "latest"),
]


def test_folders_that_are_no_steps_are_left_alone(run: Run) -> None:
    """Python and Orbax take some of these names for numbers."""
    for name in NOT_STEPS:
        shutil.copytree(run.directory / "3", run.directory / name)
    (run.directory / "50").write_text("a file")
    os.symlink(run.directory / "nowhere", run.directory / "51")
    shutil.copytree(run.directory / "3", run.directory / "9.orbax-checkpoint-tmp-12")
    with run.manager(max_to_keep=2) as manager:
        assert manager.all_steps() == [1, 2, 3]
        run.set(7)
        assert manager.restore(fallback=True).step == 3
        manager.save(4)
        manager.wait()
        assert manager.all_steps() == [3, 4]
        for step, what in ((50, "a file"), (51, "a link to nothing")):
            with pytest.raises(
                CheckpointError, match=f"(?s)no checkpoint.*{what}.*Fix: "
            ):
                manager.save(step)
    left = sorted(name for name in os.listdir(run.directory) if name != "being_deleted")
    assert left == sorted([*NOT_STEPS, "50", "51", "3", "4"])
    assert (run.directory / "50").read_text() == "a file"


@pytest.mark.parametrize("place", [shutil.copytree, os.rename, os.symlink])
def test_a_checkpoint_under_another_step_s_name(place: Any, run: Run) -> None:
    """Refused whoever reads it, and no manager's best; by its own name it is as before."""
    place(run.directory / "2", run.directory / "8")
    run.set(7)
    manager = run.manager(max_to_keep=None, keep_best=("loss", "min"))
    assert manager.latest_step == 8 and manager.best_step is None
    for restore in (
        manager.restore,
        manager.restore_or_initialize,
        lambda: manager.restore(8),
        lambda: run.checkpoint.restore(manager.latest_checkpoint),
        lambda: run.checkpoint.read(run.directory / "8"),
    ):
        with pytest.raises(
            DamagedCheckpointError,
            match=r"(?s)/8' is not the checkpoint of step 8.*Received: the checkpoint of "
            r"step 2,.*Fix: give the folder its name 2 again, or one that is no number",
        ):
            restore()
        assert run.progress["step"] == 7
    with pytest.warns(UserWarning, match="8' is not the checkpoint of step 8"):
        assert manager.restore(fallback=True).step == 3
    os.rename(run.directory / "8", run.directory / "good")
    assert run.checkpoint.restore(run.directory / "good").step == 2
    assert run.progress["step"] == 2


def test_an_empty_folder_is_a_damaged_step(run: Run) -> None:
    (run.directory / "4").mkdir()
    with run.manager() as manager:
        with pytest.raises(DamagedCheckpointError, match="a folder with nothing in it"):
            manager.restore()
        with pytest.warns(UserWarning, match="no complete checkpoint"):
            assert manager.restore(fallback=True).step == 3
        manager.save(4)
    assert run.manager().restore().step == 4


def test_a_link_to_a_step_elsewhere_is_deleted_without_it(run: Run) -> None:
    elsewhere = run.directory.parent / "elsewhere"
    os.rename(run.directory / "1", elsewhere)
    os.symlink(elsewhere, run.directory / "1")
    with run.manager(max_to_keep=2) as manager:
        assert manager.restore(1).step == 1
        manager.save(4)
    assert run.manager().all_steps() == [3, 4]
    assert run.checkpoint.restore(elsewhere).step == 1


def test_a_folder_that_cannot_be_reached_is_not_empty(
    run: Run, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    """A run would begin anew: a disk, or a store, that does not answer."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    manager = CheckpointManager(run.checkpoint, tmp_path / "loop")
    with pytest.raises(CheckpointError, match=r"loop' cannot be read.*(\n.*)*OSError"):
        manager.restore_or_initialize()

    def exists(path: epath.Path) -> bool:
        raise RuntimeError("Could not resolve host")

    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(BackendError, match=r"gs:// need(.*\n)*.*Fix: pip install gcs"):
        CheckpointManager(run.checkpoint, "gs://bucket/run")
    monkeypatch.setitem(sys.modules, "google.cloud.storage", types.ModuleType("it"))
    store = CheckpointManager(run.checkpoint, "gs://bucket/run")
    assert store.directory == "gs://bucket/run"
    assert store._folder.path(3) == "gs://bucket/run/3"
    with pytest.raises(CheckpointError, match=r"begin with hdfs://(.*\n)*.*Fix: gs://"):
        CheckpointManager(run.checkpoint, "hdfs://host/run")
    kind = type(epath.Path("gs://bucket"))
    monkeypatch.setattr(kind, "is_dir", lambda path: False)
    monkeypatch.setattr(kind, "exists", exists)
    with pytest.raises(CheckpointError, match=r"run' cannot be read.*(\n.*)*resolve"):
        store.restore_or_initialize()


def test_a_folder_that_cannot_be_written_to(run: Run) -> None:
    """Not even by root: below a file."""
    (run.directory / "file").write_text("x")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)file/ckpt-1' could not be written.*Received: \w+Error.*Fix: ",
    ) as error:
        run.checkpoint.save(run.directory / "file" / "ckpt")
    assert isinstance(error.value.__cause__, OSError)
    manager = CheckpointManager(run.checkpoint, run.directory / "file")
    with pytest.raises(CheckpointError, match="file.* could not be written"):
        manager.save(1)
        manager.wait()
    before = sorted(os.listdir(run.directory))
    path = run.checkpoint.save(run.directory / "ok")
    with pytest.raises(CheckpointError, match="There is something at"):
        run.checkpoint.write(path)
    assert sorted(os.listdir(run.directory)) == sorted(
        [*before, pathlib.Path(path).name]
    )


def mounted(folder: pathlib.Path, *arguments: str) -> None:
    """Mounts a file system in memory, or skips the test."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join(arguments), "tmpfs", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no right to mount a small file system")


@pytest.fixture
def small_disk(tmp_path: Any) -> Any:
    """A file system of 1 MB."""
    mounted(tmp_path / "disk", "size=1m")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk(asynchronous: bool, small_disk: Any) -> None:
    """The error says so, the earlier checkpoint is whole, unfinished files are gone,
    and there is room again.
    """
    with scope(2):
        large, small = keras.Variable(np.zeros(100_000)), keras.Variable(0.0)
    manager = CheckpointManager(
        Checkpoint(large=large, small=small), small_disk, 1, asynchronous=asynchronous
    )
    manager.save(0)
    manager.wait()
    other = CheckpointManager(
        Checkpoint(big=keras.Variable(np.ones(200_000))), small_disk
    )
    for _ in range(2):
        with pytest.raises(
            CheckpointError,
            match="(?s)could not be written.*[Nn]o space left.*Fix: make room",
        ):
            other.save(1)
            other.close()
        assert sorted(os.listdir(small_disk)) == ["0"]
    small.assign(5.0)
    manager.restore()
    assert float(small.value) == 0.0
    small.assign(2.0)
    manager.save(2)
    manager.close()
    assert sorted(os.listdir(small_disk)) == ["2"]


def test_a_read_only_file_system(small_disk: Any) -> None:
    """What is there is restored; to save is a clear error, now or at the next call."""
    variable = keras.Variable(1.0)
    checkpoint = Checkpoint(v=variable)
    CheckpointManager(checkpoint, small_disk, asynchronous=False).save(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    variable.assign(2.0)
    manager = CheckpointManager(checkpoint, small_disk)
    assert manager.restore().step == 1 and float(variable.value) == 1.0
    with pytest.raises(
        CheckpointError, match="(?s)could not be written.*Read-only file system.*Fix: "
    ):
        manager.save(2)
        manager.close()
    with pytest.raises(
        CheckpointError, match="(?s)could not be written.*Read-only file system.*Fix: "
    ):
        checkpoint.write(small_disk / "other")
    assert manager.all_steps() == [1]


def test_a_disk_that_fills_up_during_fit(small_disk: Any) -> None:
    """`fit` ends with the error of the save; what was saved before is whole, and
    training goes on from there.
    """
    ballast = small_disk / "ballast"

    class Filling(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 9:
                with contextlib.suppress(OSError), ballast.open("wb", 0) as file:
                    while True:
                        file.write(bytes(4096))

    with pytest.raises(
        CheckpointError,
        match="(?s)could not be written.*[Nn]o space left.*Fix: make room",
    ):
        interrupting.run(
            2, interrupting.fit_arrays, small_disk / "b", callbacks=[Filling()]
        )
    ballast.unlink()
    result = interrupting.run(2, interrupting.fit_arrays, small_disk / "b", seed=5)
    interrupting.assert_same(result, interrupting.run(2, interrupting.fit_arrays, None))


@pytest.mark.parametrize("name", ["lr=[0.1]", "[1]", "a*", "a?", "a\\b"])
def test_a_path_that_orbax_takes_for_a_pattern(
    name: str, tmp_path: pathlib.Path
) -> None:
    """Else all that was saved there is there, and cannot be read."""
    checkpoint = Checkpoint(progress={"step": 1})
    with pytest.raises(CheckpointError, match=r"(?s)not be read again.*Fix: a path"):
        CheckpointManager(checkpoint, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"(?s)not be read again.*Fix: a path"):
        checkpoint.save(tmp_path / name / "c")
    assert not list(tmp_path.iterdir()) and checkpoint.save_counter == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_arrays_that_orbax_did_not_merge(
    asynchronous: bool, monkeypatch: Any, tmp_path: pathlib.Path
) -> None:
    """No such save is complete."""
    monkeypatch.setattr(storage, "check_name", lambda path: None)
    checkpoint = Checkpoint(progress={"step": 1})
    manager = CheckpointManager(checkpoint, tmp_path / "[1]", asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="could not be written"):
        manager.save(1)
        manager.wait()
    assert manager.all_steps() == []
    with pytest.raises(CheckpointError, match=r"no manifest\.ocdbt in"):
        checkpoint.write(tmp_path / "[1]" / "c")
    manager.close()
