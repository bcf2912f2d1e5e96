"""For all tests: what hypothesis is given, and what this machine or the surrounding job is too small for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import job

# How long an example takes depends on the machine's other work; what it finds does not.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    job.enter(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    job.leave()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests for more GPUs than there are, or more ranks than a surrounding job has, are skipped with a reason."""
    for item in items:
        if (mark := item.get_closest_marker("mpi")) and (size := job.size()) and mark.args[0] > size:
            item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]} ranks, this job has {size}"))
        if (mark := item.get_closest_marker("gpu")) and mark.args[0] > (gpus := gpu_count()):
            item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]} GPUs, there are {gpus}"))


def pytest_collection_finish() -> None:
    """What has been imported by now stays, so that no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def real_kernels_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test gets launchers that an emulated GPU of a test before has left."""
    yield
    emulation = sys.modules.get("tests.kernels.emulation")
    if emulation is not None and "monkeypatch" in request.fixturenames:
        emulation.forget()


def gpu_count() -> int:
    import torch  # noqa: PLC0415

    return torch.cuda.device_count()
