"""Measured parameter servers and all-reduces of 2017: the speed-up from 1 to n GPUs, nothing fitted to the rows.

The table beside this file holds facts: all synthetic rows of TensorFlow's benchmarks of May 2017
(tensorflow.org/performance/benchmarks) on a DGX-1 with P100, as samples a second and, what follows, seconds a step.
"""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("parameter_server_runs.csv")


@pytest.fixture(scope="module")
def found():
    spec = importlib.util.spec_from_file_location("cnn_scaling", ROOT / "benchmarks" / "cnn_scaling.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return list(module.scalings(module.rows(TABLE)))


def test_a_step_takes_as_long_as_its_samples():
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            samples = int(row["num_gpus"]) * int(row["mbs"])
            assert float(row["step_time_s"]) == pytest.approx(samples / float(row["samples_per_s"]), abs=1e-6)


def test_every_row_of_several_gpus_is_predicted(found):
    assert len(found) == 27
    assert {each.sync for each in found} == {"parameter server", "all-reduce"}


def test_speed_ups_come_out_within_20_percent(found):
    far = [each for each in found if abs(each.error) > 0.2]
    assert not far, far


def test_parameter_servers_come_out_closer(found):
    assert max(abs(each.error) for each in found if each.sync == "parameter server") < 0.1
