"""A disk that is full when a checkpoint is written: one clear error, nothing lost, and the same call works once there is room."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import art_core as art
from art_backend import LocalBackend
from art_core.errors import StorageError
from tests.backend.test_local import ADAPTER, backend, group, trainable

Full = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Full]]:
    """A file system of one megabyte, and a context in which it is full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")

    @contextmanager
    def full() -> Iterator[None]:
        filler = folder / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(b"x" * 2**20)
        yield
        filler.unlink()

    yield folder, full
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_files(tmp_path: Path) -> tuple[Path, Full]:
    """A folder, and a context in which no file of it may have more than a few bytes (a quota, as far as a process sees)."""

    @contextmanager
    def full() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return tmp_path, full


@pytest.mark.parametrize("disk", ["small_disk", "small_files"])
async def test_ckpt_a_full_disk_costs_the_step_and_nothing_else(
    tiny_llama: Path, tmp_path: Path, request: pytest.FixtureRequest, disk: str
) -> None:
    folder, full = request.getfixturevalue(disk)
    model = trainable(folder, tiny_llama)
    async with backend() as local:
        await model.register(local)
        rollouts = await group(model, [1.0, 0.0])
        with full(), pytest.raises(StorageError, match=r"space|large"):
            await local.train(model, [rollouts], learning_rate=1e-2)
        assert await model.get_step() == 0
        assert [t.final_policy_version for t in await group(model, [1.0, 0.0])] == [0, 0]
        result = await local.train(model, [rollouts], learning_rate=1e-2)
        assert (result.step, local.checkpoints(model).steps()) == (1, [0, 1])
        weights = local.checkpoints(model).path(1).joinpath("adapter_model.safetensors").read_bytes()
    undisturbed = art.TrainableModel(name="calm", project="p", base_model=str(tiny_llama), base_path=tmp_path / "calm")
    async with LocalBackend(adapter=ADAPTER, max_batch_size=8, max_model_len=256) as local:
        await undisturbed.register(local)
        rollouts.trajectories[:] = [t.model_copy(deep=True) for t in rollouts]
        for choice in (choice for t in rollouts for choice in t.choices()):
            choice.model = "calm"  # type: ignore[attr-defined]
        await local.train(undisturbed, [rollouts], learning_rate=1e-2)
        path = local.checkpoints(undisturbed).path(1) / "adapter_model.safetensors"
        assert path.read_bytes() == weights  # the step that was lost was trained once, not twice
