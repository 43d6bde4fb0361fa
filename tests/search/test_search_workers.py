"""Executors: answers as they come, and a worker that dies costs a retry, never a task."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from simpar import Cluster, sweep
from simpar.errors import JobError
from simpar.search.dask import dask_executor
from simpar.search.workers import WorkerLostError, Workers

DASK = import_module("simpar.search.dask")


def square(number: int) -> int:
    return number * number


def dies_once(task: tuple[str, int]) -> int:
    """Kills its process, as an out-of-memory killer would, the first time that 3 comes along."""
    folder, number = task
    mark = Path(folder) / "killed"
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def dies(task: int) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def fails(task: int) -> int:
    raise RuntimeError(f"task {task} has a mistake of its own")


def test_every_task_has_its_answer():
    for executor, count in ((None, 1), (None, 2)):
        with Workers(executor, count) as workers:
            assert dict(workers.run(square, range(20))) == {n: n * n for n in range(20)}
    with ThreadPoolExecutor(2) as threads, Workers(threads) as workers:
        assert dict(workers.run(square, range(20))) == {n: n * n for n in range(20)}


def test_tasks_are_taken_when_they_can_run():
    taken = []

    def tasks():
        for number in range(50):
            taken.append(number)
            yield number

    with Workers(None, 2) as workers:
        run = workers.run(square, tasks())
        next(run)
        assert len(taken) <= 4
        run.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_worker_that_is_killed_costs_a_retry_and_no_task(tmp_path: Path, own: bool):
    executor = None if own else ProcessPoolExecutor(2)
    tasks = [(str(tmp_path), number) for number in range(12)]
    with Workers(executor, 2) as workers:
        answers = list(workers.run(dies_once, tasks))
    assert (tmp_path / "killed").exists()
    assert sorted(answers) == [((str(tmp_path), n), n * n) for n in range(12)]
    if executor is not None:
        executor.shutdown()


def test_a_task_that_always_kills_its_worker_is_given_up_alone():
    with Workers(None, 2) as workers:
        answers = dict(workers.run(dies, range(6)))
    lost = answers.pop(3)
    assert isinstance(lost, WorkerLostError)
    assert "died 3 times" in str(lost)
    assert answers == {n: n for n in (0, 1, 2, 4, 5)}


def test_a_mistake_of_the_task_itself_is_no_death():
    with Workers(None, 2) as workers, pytest.raises(RuntimeError, match="a mistake of its own"):
        list(workers.run(fails, range(3)))


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("tasks", ["idle", "busy"])
@pytest.mark.parametrize("method", [None, "spawn"])
def test_workers_end_with_their_parent_however_it_ends(method: str | None, tasks: str, ends_by: int):
    script = f"""
import time
from simpar.search.workers import processes
pool = processes(2, {method!r})
list(pool.map(time.sleep, [0.2] * 2))
waited = pool.map(time.sleep, [600] * 2) if {tasks!r} == "busy" else None
print("ready", flush=True)
time.sleep(600)
"""
    # workers hold the pipe that their parent writes to, so that it ends with the last of them
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(ends_by)
        assert parent.communicate(timeout=30)[0] == b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def two_workers(distributed):
    """A real scheduler and two worker processes on loopback."""
    return distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None, silence_logs=50
    )


def test_dask_workers_do_the_same():
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    job = {"model": "gpt2", "cluster": "h100-sxm:4"}
    vary = {"plan.tp": [1, 2, 3, 4]}
    with two_workers(distributed) as cluster, dask_executor(cluster.scheduler_address) as executor:
        found = sweep(job, vary, executor=executor, workers=2)
    assert found.rows == sweep(job, vary, workers=1).rows
    assert "error" in found.rows[2]


def test_a_dask_worker_that_is_killed_costs_a_retry(tmp_path: Path):
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    tasks = [(str(tmp_path), number) for number in range(6)]
    with (
        two_workers(distributed) as cluster,
        dask_executor(cluster.scheduler_address) as executor,
        Workers(executor, 2) as workers,
    ):
        answers = sorted(workers.run(dies_once, tasks))
    assert (tmp_path / "killed").exists()
    assert [answer for _, answer in answers] == [n * n for n in range(6)]


def test_a_scheduler_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("distributed", reason="dask is not installed")
    monkeypatch.setattr(DASK, "CONNECT_S", 0.5)
    with pytest.raises(JobError, match="no scheduler answers"), dask_executor("tcp://127.0.0.1:9"):
        pass


@pytest.mark.parametrize(
    "address",
    ["foo", "", "http://x:1", "tcp://h", "tcp://h:", "tcp://h:x", "tcp://:1", "tcp://h:70000", "tcp://[::1", "a:b:1"],
)
def test_what_is_no_address_is_said_at_once_and_leaves_no_client_behind(address: str, monkeypatch: pytest.MonkeyPatch):
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    monkeypatch.setattr(distributed, "Client", lambda *_, **__: pytest.fail("asked for a connection"))
    with pytest.raises(JobError, match="is no address of a scheduler; write it as in tcp://"), dask_executor(address):
        pass


def test_without_dask_its_absence_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(JobError, match=r"pip install 'simpar\[dask\]'"), dask_executor("tcp://127.0.0.1:9"):
        pass


def test_clusters_travel_to_workers():
    import pickle  # noqa: PLC0415

    cluster = Cluster.parse("h100-sxm:2x8")
    assert pickle.loads(pickle.dumps(cluster)) == cluster
