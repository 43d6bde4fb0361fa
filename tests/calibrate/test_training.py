"""Real training steps: whatever the strategy, the losses are those of one device, so each trains what it should."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs torch")

from calibrate.training import Gpt, Perceptron, Recipe, Trainers, TrainingError

WIDE = Perceptron((64, 96, 80, 96, 16))
TINY = Gpt(layers=2, hidden=32, heads=4, vocab=64, seq_len=16)
SAMPLES = 8  # of a step over all replicas
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(2, timeout_s=60.0) as found:
        yield found


def recipe(network: Perceptron | Gpt, strategy: str) -> Recipe:
    """``SAMPLES`` samples a step, however they are spread."""
    replicas = 2 if strategy in ("dp", "zero1", "fsdp") else 1
    microbatches = 4 if strategy in ("gpipe", "1f1b") else 1
    return Recipe(
        network=network,
        strategy=strategy,  # type: ignore[arg-type]
        ranks=1 if strategy == "one" else 2,
        micro_batch=SAMPLES // replicas // microbatches,
        microbatches=microbatches,
        optimizer="adam" if isinstance(network, Gpt) else "sgd",
        learning_rate=0.01 if isinstance(network, Gpt) else 0.5,
    )


@pytest.fixture(scope="module")
def alone(trainers: Trainers) -> dict[str, tuple[float, ...]]:
    """Losses of one device."""
    return {
        type(network).__name__: trainers.run(recipe(network, "one"), steps=3, warmup=1).losses
        for network in (WIDE, TINY)
    }


CASES = [(WIDE, s) for s in ("dp", "zero1", "fsdp", "gpipe", "1f1b")]
CASES += [(TINY, s) for s in ("tp", "1f1b")]


@pytest.mark.parametrize(("network", "strategy"), CASES, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_losses_are_those_of_one_device(
    trainers: Trainers, alone: dict[str, tuple[float, ...]], network: Perceptron | Gpt, strategy: str
) -> None:
    trained = trainers.run(recipe(network, strategy), steps=3, warmup=1)
    expected = alone[type(network).__name__]
    assert len(trained.losses) == 4
    assert trained.losses == pytest.approx(expected, rel=2e-4)
    # it learns: an update that did nothing would leave the first loss as it is
    assert trained.losses[3] < 0.99 * trained.losses[0]
    assert len(trained.step_s) == 3
    assert all(1e-5 < seconds < 30 for seconds in trained.step_s)


def test_a_second_round_goes_on_with_the_same_network(trainers: Trainers) -> None:
    first = trainers.run(recipe(WIDE, "dp"), steps=2, warmup=1)
    second = trainers.run(recipe(WIDE, "dp"), steps=2, warmup=1)
    assert (len(first.losses), len(second.losses)) == (3, 2)
    assert second.losses[0] < first.losses[-1]


def test_recipes_that_do_not_fit_the_processes(trainers: Trainers) -> None:
    with pytest.raises(
        TrainingError, match="a recipe of 4 ranks needs as many processes, but there are 2; start Trainers"
    ):
        trainers.run(Recipe(network=WIDE, strategy="dp", ranks=4, micro_batch=2))
    with pytest.raises(TrainingError, match="0 steps after 2 untimed ones measure nothing; take at least one step"):
        trainers.run(recipe(WIDE, "dp"), steps=0)
    assert len(trainers.process_ids) == 2


def test_a_killed_process_ends_all_with_one_sentence() -> None:
    started = Trainers(2, timeout_s=60.0)
    pids = started.process_ids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(TrainingError, match="the process of rank 1 was killed by signal 9 during training; look at"):
        started.run(recipe(WIDE, "dp"))
    assert started.process_ids == ()
    assert not Path(started.folder).exists()
    with pytest.raises(TrainingError, match="these processes were ended; start new ones"):
        started.run(recipe(WIDE, "dp"))


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from calibrate.training import Trainers
        if __name__ == "__main__":
            trainers = Trainers(1)
            print(*trainers.process_ids, trainers.folder, flush=True)
            os._exit(1)
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    pid, folder = ran.stdout.split()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (_alive(int(pid)) or Path(folder).exists()):
        time.sleep(0.1)
    assert not _alive(int(pid))
    assert not Path(folder).exists()


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "ddp"}, "unknown strategy 'ddp'; choose one of one, dp,"),
        ({"strategy": "one"}, "strategy 'one' does not run on 2 rank"),
        ({"ranks": 1}, "strategy 'dp' does not run on 1 rank"),
        ({"microbatches": 2}, "2 microbatches need a pipeline, which 'dp' is not; set microbatches=1"),
        ({"strategy": "tp"}, "'tp' splits a transformer's heads, which a perceptron has none of; use a Gpt"),
        ({"strategy": "dp-pp", "ranks": 5}, "'dp-pp' has two stages, but 5 ranks are odd; use an even number"),
        ({"strategy": "gpipe", "ranks": 5}, "4 layers do not fill 5 stages; use fewer ranks"),
    ],
)
def test_recipes_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Recipe(**{"network": WIDE, "strategy": "dp", "ranks": 2, "micro_batch": 4, **fields})  # type: ignore[arg-type]


def test_stages_hold_every_layer_once() -> None:
    from calibrate.training.models import layers, stage_layers  # noqa: PLC0415 - imports torch

    for network, count in ((WIDE, 4), (Perceptron((8, 8, 8, 8)), 3), (TINY, 4)):
        made = Recipe(network=network, strategy="gpipe", ranks=2, micro_batch=1, microbatches=2)
        held = stage_layers(made)
        assert [layer for part in held for layer in part] == list(range(count))
        import torch  # noqa: PLC0415

        assert len(layers(made, torch.device("cpu"))) == count
