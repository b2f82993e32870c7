"""Memory that the package asks for uninitialised comes full of NaN: whoever reads it before writing is found out.
Triton's interpreter, where it runs, is hastened: see interpreted.py.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from sartor import kernels

BEFORE, PASSED = pytest.StashKey(), pytest.StashKey()  # names in the file `--passed`, and their items

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Threads of one process wait for those that another one's keep from a core, and take a core to wait
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", str(share))))
    # Each has another card for its first
    cards = [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    first = int(worker[2:]) % (len(cards) or 1)
    if cards:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(cards[first:] + cards[:first]))

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted import hasten

    hasten()


def _poisoned(make):
    def call(*args, **kwargs):
        t = make(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("sartor"):
            t.fill_(float("nan") if t.is_floating_point() else t.dtype is torch.bool or 113)
        return t

    return call


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """H05: `torch.empty`, `empty_like` and `new_empty` give poison to `sartor`."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What is there when a module begins, millions of objects that imports have made, stays: who collects garbage, as a
    bench does for each row, walks what came since. Not where it may hold a GPU's memory."""
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def pending(request, monkeypatch):
    """Tests on a GPU take what none has run yet: they are what it waits for."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("SARTOR_PENDING", "1")


def pytest_addoption(parser):
    parser.addoption("--kernels", default="", help="comma-separated: only tests that judge one of these kernels")
    parser.addoption("--rehearse", action="store_true", help="GPU tests without a GPU: see rehearse.py")
    parser.addoption("--passed", default="", help="file: tests it names are not run, and each that passes is added")
    parser.addoption("--planned", default="", help="file to write: the tests that will be run, and what each judges")


def pytest_configure(config):
    if config.option.rehearse:
        import rehearse

        config.pluginmanager.register(rehearse.Plugin())
    if hasattr(config, "workerinput"):
        config.stash[BEFORE] = set(config.workerinput.get("passed", ()))
    elif config.option.passed:
        path = Path(config.option.passed)
        config.stash[BEFORE] = set(path.read_text(encoding="utf-8").splitlines())
        config.pluginmanager.register(Passing(path, sorted(config.stash[BEFORE])))


class Passing:
    """Adds a line to a file when a test has passed, what comes after it included."""

    def __init__(self, path, before):
        self.path, self.before, self.called = path, before, set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Processes of pytest-xdist leave out the same tests, whenever they begin."""
        node.workerinput["passed"] = self.before

    def pytest_runtest_logreport(self, report):
        if report.passed and report.when == "call":
            self.called.add(report.nodeid)
        elif report.passed and report.when == "teardown" and report.nodeid in self.called:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_name(report.nodeid) + "\n")


def pytest_collection_modifyitems(config, items):
    """A test that names no kernel (mark `judges`) is about the way to all of them, and always runs; with a parameter
    `dtype` or `kernel` it is about the way to those that take it."""
    every = {*kernels.FORWARD, *kernels.BACKWARD}
    wanted = set(filter(None, config.getoption("--kernels").split(",")))
    if wanted - every:
        raise pytest.UsageError(f"--kernels must be among {', '.join(sorted(every))}, got {config.option.kernels!r}")
    left = []
    for item in items:
        item.user_properties.append(("done", "yes"))  # JUnit's XML has it of what came to its end
        about = _about(item)
        if (about or set()) - every:
            raise pytest.UsageError(f"{item.nodeid} judges kernels that there are not: {sorted(about - every)}")
        if about is not None:
            item.user_properties.append(("judges", " ".join(sorted(about))))
        if wanted and about is not None and not about & wanted:
            left.append(item)
    dropped = set(map(id, left))
    before = config.stash.get(BEFORE, set())
    config.stash[PASSED] = [item for item in items if id(item) not in dropped and _name(item.nodeid) in before]
    dropped |= set(map(id, config.stash[PASSED]))
    config.hook.pytest_deselected(items=[*left, *config.stash[PASSED]])
    # What is about all comes first: a run that is stopped then says most.
    items[:] = sorted((item for item in items if id(item) not in dropped), key=lambda item: _judges(item) is not None)


def _about(item):
    """The kernels that a test judges; None: all."""
    marks = list(item.iter_markers("judges"))
    about = {name for mark in marks for name in mark.args} if marks else None
    params = getattr(item, "callspec", None) and item.callspec.params
    if not item.get_closest_marker("gpu") or not params or not {"dtype", "kernel"} & set(params):
        return about
    from judged import narrowed

    may = narrowed(params)
    return may if about is None else about & may


def _judges(item):
    return dict(item.user_properties).get("judges")


def _name(nodeid):
    """As in JUnit's XML."""
    file, _, test = nodeid.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}::{test}"


def pytest_collection_finish(session):
    """What passed before is of the plan."""
    config = session.config
    path, worker = config.option.planned, getattr(config, "workerinput", {"workerid": "gw0"})
    if path and worker["workerid"] == "gw0":
        judged = {_name(item.nodeid): _judges(item) for item in (*session.items, *config.stash[PASSED])}
        Path(path).write_text(json.dumps(judged), encoding="utf-8")
