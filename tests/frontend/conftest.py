from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.checkpoint import build_checkpoint
from tests.frontend.running import Frontend, running
from tests.frontend.stub_engine import StubConfig

REPLY = "The capital of France is Paris, naïve 🙂 café."


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model") / "tiny-chat")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> FrontendConfig:
    return FrontendConfig(model=str(checkpoint))


@pytest.fixture(scope="module")
def frontend(config: FrontendConfig, tokenizer: Tokenizer) -> Iterator[Frontend]:
    """A frontend before one stub leader that always answers REPLY."""
    with running(config, [StubConfig(script=tokenizer.encode(REPLY))]) as started:
        yield started
