"""The lease of a run in a store: one holder, taken over at once from the dead, and after its time from another machine."""

import json
import os
import signal
import threading
import time

import pytest

from addons.stores import _lease
from addons.stores._lease import FOLDER, Lease
from addons.stores._store import Store
from engine.config.errors import Failure, UsageError
from tests.helpers import kit


def lease(address: str, seconds: float = 600, **holder) -> Lease:
    """Return a lease as of another process, or machine, by other values of `holder`."""
    made = Lease(Store(address, "output_dir"), seconds, "launch")
    made.holder |= holder
    return made


def hold(address: str, seconds: float) -> None:
    """Take the lease in a process of its own, and keep it until it is killed."""
    lease(address, seconds).take()
    print("taken", flush=True)
    threading.Event().wait()


@pytest.fixture
def holding(address, tmp_path):
    """A living process that holds the lease of `address`."""
    [process] = kit.fork(1, hold, address, 4, out=tmp_path / "holder")
    printed = tmp_path / "holder" / "rank0.txt"
    kit.until(lambda: printed.exists() and "taken" in printed.read_text(), 60)
    return process


def test_second_run_is_refused_and_a_dead_one_replaced_at_once(address, holding):
    """By a process of this machine, then as by another machine: each is told host and process of the first one."""
    for holder in ({}, {"machine": "another"}):
        with pytest.raises(UsageError, match=rf"output_dir: .*process {holding.pid} on {os.uname().nodename}.*20\d\d-"):
            lease(address, **holder).take()
    os.kill(holding.pid, signal.SIGKILL)
    holding.join()
    lease(address).take()  # would wait for 4 seconds, were it not the same machine


def test_lease_of_another_machine_is_taken_when_it_has_run_out(address, holding):
    """It is not renewed any more, and its holder, which only slept, may not write when it wakes up."""
    first = lease(address)
    first.number, first.holder = first.newest()  # as the process that holds it
    os.kill(holding.pid, signal.SIGKILL)
    second = lease(address, machine="another")
    second.take()
    assert second.number > first.number
    with pytest.raises(Failure, match="taken over"):
        first.renew()
    with pytest.raises(Failure, match="taken over"):
        first.check()
    second.renew()


@pytest.mark.parametrize(
    "holder",
    [{"job": "SLURM_JOB_ID 7"}, {"time": time.time() - 10_000}, {"released": True}],
    ids=lambda h: next(iter(h)),
)
def test_same_job_an_old_lease_and_a_released_one_are_taken_at_once(address, holder):
    first = lease(address, machine="another", **{name: holder[name] for name in {"job"} & holder.keys()})
    assert first._create(1, **{name: holder[name] for name in {"time", "released"} & holder.keys()})
    began = time.monotonic()
    lease(address, job=holder.get("job", "")).take()
    assert time.monotonic() - began < 300  # the lease is of 600 s


def test_holder_that_slept_while_its_number_was_removed(address):
    """It can create that number again, which others have removed; the list shows the newer one."""
    first = lease(address)
    assert first._create(1)
    second = lease(address)
    for number in (2, 3, 4):
        assert second._create(number)
    assert not first._create(2)
    assert {*Store(address, "").list(FOLDER)} == {f"{FOLDER}/4.json"}
    assert second._create(5)


def test_request_without_a_response_is_the_own(address, monkeypatch):
    """A retried request finds what the first one wrote."""
    one = lease(address)
    create = one.store.create
    monkeypatch.setattr(one.store, "create", lambda *args: create(*args) and create(*args))
    assert one._create(1)
    assert not lease(address)._create(1)


def test_process_of_another_run_with_the_same_number(address, monkeypatch):
    """A number that another process has by now does not stand for the dead holder."""
    first = lease(address, started="long ago", process=os.getpid())
    assert first._create(1)
    lease(address).take()
    assert _lease._started(os.getpid())
    assert json.loads(Store(address, "").read(f"{FOLDER}/2.json") or b"")["process"] == os.getpid()
