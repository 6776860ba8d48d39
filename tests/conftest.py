"""Settings of every test: offline, no fork, and one thread, as tiny models lose more by waiting for threads.

Fixtures of the whole session are built once in each of pytest-xdist's workers.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import logging
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers.models import llama, noisy, t5
from helpers.patches import noted
from helpers.tiny_pair import save_pair
from transformers import GenerationMixin, PreTrainedModel

import hf_specdec
from hf_specdec.prepared import compiled_step, cuda_graphs, own_builds
from hf_specdec.prepared.prepared_rounds import PreparedRounds

torch.set_num_threads(1)
GENERATE = GenerationMixin.generate


def _no_fork() -> NoReturn:
    raise AssertionError(
        "a test forks the test process: locks that another thread holds stay locked in the child, and it may hang; "
        "start a process of its own with subprocess"
    )


# `multiprocessing` and `pty` look it up here; `subprocess` runs another program and does without.
os.fork = _no_fork


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that no worker waits for the other at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("prepared", "bench"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    refusal = compiled_step.compile_refusal(torch.device("cpu"))
    if refusal is not None and item.get_closest_marker("compiles"):
        pytest.skip(refusal)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    """A test that leaves `generate` replaced fails itself, instead of whichever runs after it."""
    result = yield
    if GenerationMixin.generate is not GENERATE:
        GenerationMixin.generate = GENERATE
        raise AssertionError("GenerationMixin.generate is still replaced after this test")
    return result


@pytest.fixture(autouse=True)
def _told_in_this_test_only(monkeypatch) -> None:
    """A process tells once why something is not compiled."""
    monkeypatch.setattr(own_builds, "_told", set())


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A decoder-only target in float64 and a draft near it, which no test of a module may change."""
    target = llama()
    return target, noisy(target)


@pytest.fixture(scope="module")
def t5_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same of encoder-decoder models."""
    target = t5()
    return target, noisy(target)


@pytest.fixture
def enabled() -> Iterator[None]:
    """All models' `generate` takes the package's settings."""
    with hf_specdec.enable():
        yield


@pytest.fixture
def no_name_is_outdated(monkeypatch) -> Iterator[None]:
    """A warning of an outdated name is an error, whether it is raised by Python or logged by transformers."""

    def refuse(self: logging.Logger, message: str, *args: Any, **kwargs: Any) -> None:
        assert "deprecated" not in message, message

    monkeypatch.setattr(logging.Logger, "warning_once", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield


@pytest.fixture
def fast_rounds(monkeypatch) -> Iterator[list[PreparedRounds]]:
    """Rounds run as on CUDA, on a CPU uncaptured; lists who ran them."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    ran = noted(monkeypatch, PreparedRounds, "make_round", lambda self, *_: self)
    with hf_specdec.enable(generation_strategy="speculative"):
        yield ran


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a tiny target and its draft, decoder-only, to be read by any test and changed by none."""
    return save_pair(tmp_path_factory.mktemp("decoder-only"))
