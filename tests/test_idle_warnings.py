"""Lines of other libraries that ask nothing of the user are left out, and no others."""

import enum
import logging
import sys
import types

import pytest

from scaleray.common.idle_warnings import leave_out_idle_warnings

FOREIGN = "Failed to load /site/torchao/_C_mxfp8.cpython-27-x86_64-linux-gnu.so: Could not load this library"
OURS = f"Failed to load /site/torchao/_C.{sys.implementation.cache_tag}-x86_64-linux-gnu.so: undefined symbol"
FOR_ALL = "Failed to load /site/torchao/_C_cutlass_90a.abi3.so: Could not load this library"


@pytest.fixture(autouse=True)
def filters_taken_back():
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [list(logger.filters) for logger in loggers]
    leave_out_idle_warnings()
    leave_out_idle_warnings()
    yield
    assert [len(logger.filters) for logger in loggers] == [max(1, len(filters)) for filters in before], "added once"
    for logger, filters in zip(loggers, before, strict=True):
        logger.filters[:] = filters


def shown(monkeypatch, caplog, *, cuda, lines):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=types.SimpleNamespace(cuda=cuda)))
    for line in lines:
        logging.getLogger("torchao").warning(line)
    return caplog.messages


def test_without_cuda_no_library_of_torchaos_is_missed(monkeypatch, caplog):
    assert shown(monkeypatch, caplog, cuda=None, lines=[FOREIGN, OURS, FOR_ALL]) == []


def test_with_cuda_a_library_that_should_have_loaded_is_named(monkeypatch, caplog):
    assert shown(monkeypatch, caplog, cuda="13.0", lines=[FOREIGN, OURS, FOR_ALL]) == [OURS, FOR_ALL]


def test_whatever_else_torchao_says_is_shown(monkeypatch, caplog):
    lines = ["Failed to load the config", "torchao needs a newer torch"]
    assert shown(monkeypatch, caplog, cuda=None, lines=lines) == lines


def test_what_torch_says_to_torchaos_authors_is_left_out_and_what_it_says_of_other_classes_is_shown(caplog):
    kinds = [enum.Enum(name, "A", module=f"{name}.kinds") for name in ("torchao", "mine")]
    for kind in kinds:
        logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass", kind)
    logging.getLogger("torch.utils._pytree").warning("no tree")
    assert caplog.messages == ["<enum 'mine'> is an Enum subclass", "no tree"]
