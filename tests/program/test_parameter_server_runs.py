"""Measured parameter servers and all-reduces of 2017: the speed-up from 1 to n GPUs, nothing fitted to the rows."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT.parent / "shared" / "data" / "runs" / "parameter_server.csv"


@pytest.fixture(scope="module")
def found():
    if not TABLE.exists():
        pytest.skip("the table of measured runs is not here")
    spec = importlib.util.spec_from_file_location("cnn_scaling", ROOT / "benchmarks" / "cnn_scaling.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return list(module.scalings(module.rows(TABLE)))


def test_every_row_of_several_gpus_is_predicted(found):
    assert len(found) == 27
    assert {each.sync for each in found} == {"parameter server", "all-reduce"}


def test_speed_ups_come_out_within_20_percent(found):
    far = [each for each in found if abs(each.error) > 0.2]
    assert not far, far


def test_parameter_servers_come_out_closer(found):
    assert max(abs(each.error) for each in found if each.sync == "parameter server") < 0.1
