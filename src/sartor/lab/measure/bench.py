"""The bench: for each workload prepare every provider, check it, measure its memory, then time all of them together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sartor.device import Device
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import accuracy, ahead, fingerprint, fresh, providers, roofline, unseen
from sartor.lab.measure.contention import Contention
from sartor.lab.measure.memory import peak_mib
from sartor.lab.measure.planned import plan_of
from sartor.lab.measure.records import Record, Run, sm_clock_mhz
from sartor.lab.measure.timing import Budget, interleave, own_stream, synchronize
from sartor.lab.workloads.suites import Suite
from sartor.lab.workloads.workload import Inputs, Workload


@dataclass
class Session:
    """One process measuring one suite on one device."""

    run: Run
    device: torch.device
    budget: Budget = field(default_factory=Budget)
    check: bool = True
    max_seconds: float = float("inf")
    ceilings: roofline.Ceilings = field(default_factory=lambda: roofline.Ceilings({}, 0.0))
    spent: dict[str, float] = field(default_factory=dict)  # seconds, by what they were spent on

    def measure(self, suite: Suite, tell: Callable[[str], None] = lambda text: None) -> Iterator[list[Record]]:
        """The records of each workload as soon as they are there; stops early at `max_seconds`. On a GPU several
        processes compile first, and are gone before anything is timed."""
        deadline = time.monotonic() + self.max_seconds
        if self.device.type == "cuda" and not suite.fresh:
            with self._spending("compiling ahead"):
                ahead.prepare(suite.cases, self.device, tell, deadline=deadline)
        if not suite.fresh:
            tell("ceilings")
            with self._spending("ceilings"):
                self.ceilings = roofline.measure(self.device, sorted({w.dtype for w, _ in suite.cases}))
            yield roofline.to_records(self.ceilings, self.run)
        for w, who in suite.cases:
            if time.monotonic() > deadline:
                return
            tell(str(w))
            with own_stream(self.device):
                records = self.first_calls(w, who) if suite.fresh else self.measure_one(w, who, suite.unseen)
            yield records

    def first_calls(self, w: Workload, who: tuple[str, ...]) -> list[Record]:
        """One record per provider, of first calls in processes of their own, or the reason why there are none."""
        records = [Record.of(self.run, name, w) for name in who]
        for record in records:
            record.skipped = providers.get(record.provider).why_not(w, self.device) or None
            if record.skipped:
                continue
            try:
                describe(record, w, Inputs.make(w, self.device))
                fresh.measure(record, self.device)
                sign(record, self.device)
            except Exception as error:  # as in `_prepare`
                record.skipped = providers.reason(error)
        return records

    def measure_one(self, w: Workload, who: tuple[str, ...], lengths: bool = False) -> list[Record]:
        """One record per provider: measured together, or skipped with the reason. `lengths`: other ones too."""
        records = {name: Record.of(self.run, name, w) for name in who}
        try:
            with self._spending("errors and memory"):
                x = Inputs.make(w, self.device)
                judge = accuracy.Judge.make(w, x) if self.check else None
        except torch.cuda.OutOfMemoryError:
            for record in records.values():
                record.skipped = providers.OOM
            return list(records.values())
        runs = {}
        for name, record in records.items():
            run = self._prepare(record, w, x, judge, lengths)
            if run is not None:
                runs[name] = run
        del judge
        before, others = sm_clock_mhz(self.device), Contention.watch(self.device)
        with self._spending("timing"):
            timings = interleave(runs, self.device, self.budget, cold_l2=w.mode in ("decode", "graph"))
        after, taken = sm_clock_mhz(self.device), others.share()
        for name, timing in timings.items():
            record = records[name]
            record.ms, record.ms_p20, record.ms_p80 = timing.ms, timing.at(0.2), timing.at(0.8)
            record.host_us, record.wall_us = timing.host_us, timing.wall_us
            record.clock_mhz_before, record.clock_mhz_after, record.contention = before, after, taken
            _rates(record, w, self.ceilings)
        del runs, x
        with self._spending("fingerprints"):
            _release(self.device)
            for record in records.values():
                sign(record, self.device)
        return list(records.values())

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        """Count the seconds of what is done meanwhile."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.monotonic() - begin

    def _prepare(self, record: Record, w: Workload, x: Inputs, judge: accuracy.Judge | None, lengths: bool) -> Any:
        """The closure to time, with first call, errors, memory and, if asked for, calls of other lengths in the record;
        None with the reason in `skipped`."""
        provider = providers.get(record.provider)
        record.skipped = provider.why_not(w, self.device) or None
        if record.skipped:
            return None
        try:
            describe(record, w, x)
            with self._spending("first calls"):
                start = time.perf_counter()
                attend = provider.make(w, x)
                run = providers.runner(attend, w, x)
                run()
                synchronize(self.device)
                record.first_call_s = time.perf_counter() - start
            with self._spending("errors and memory"):
                if judge is not None:
                    found = judge.judge(attend, providers.lse(record.provider, w, x))
                    record.err_rel, record.err_max, record.err_budget = found.err_rel, found.err_max, found.err_budget
                    record.cos_sim = found.cos_sim
                    record.errors = {f"{n} {k}": getattr(e, k) for n, e in found.each.items() for k in ("rel", "max")}
                both = replace(w, mode="fwd_bwd") if w.mode == "bwd" else w  # what it keeps from its forward counts
                record.peak_mem_mib = peak_mib(providers.runner(attend, both, x), self.device)
                record.unseen_us = unseen.call_us(attend, w, x, self.device) if lengths else None
            return run
        except Exception as error:  # whatever a provider throws is a fact about it, and goes into its record
            record.skipped = providers.reason(error)
            del error
            _release(self.device)
            return None


def describe(record: Record, w: Workload, x: Inputs) -> None:
    """The plan behind a record of Sartor or of a rung."""
    if record.base_provider == "rung":
        rung = ladder.find(record.provider.removeprefix("rung:"))
        record.plan = rung.plan(w, Device.of(x.q.device))
    if record.base_provider != "sartor":
        return
    plan = plan_of(record.provider, w, x)
    if plan is not None:
        record.plan = str(plan)
        record.smem_bytes, record.smem_padded_bytes = plan.shared_bytes, plan.padded().shared_bytes


def sign(record: Record, device: torch.device) -> None:
    """The fingerprint of what was measured; it compiles, so that it comes after first calls."""
    found = fingerprint.attempt(record.provider, record.workload, Device.of(device)) if not record.skipped else None
    record.fingerprint = found.fingerprint if found else None


def _rates(record: Record, w: Workload, ceilings: roofline.Ceilings) -> None:
    assert record.ms is not None
    record.tflops = w.flops / record.ms * 1e-9
    record.gbps = w.bytes / record.ms * 1e-6
    least = ceilings.ms(w)
    record.pct_ceiling = 100 * least / record.ms if least else None


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
