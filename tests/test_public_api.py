"""The public names: few, sorted, importable, documented."""

from importlib import import_module

import pytest

import simpar


def test_all_is_sorted_and_says_what_there_is():
    assert simpar.__all__ == sorted(simpar.__all__)
    assert simpar.__all__ == list(simpar._HOMES)


@pytest.mark.parametrize("name", simpar.__all__)
def test_each_name_is_the_one_of_its_home(name):
    value = getattr(simpar, name)
    assert value is getattr(import_module(simpar._HOMES[name]), name)
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'simpar' has no attribute 'simulatte'"):
        simpar.simulatte  # noqa: B018 - asking is the test
    assert not hasattr(simpar, "__wrapped__")


def test_errors_are_one_family():
    errors = [getattr(simpar, name) for name in simpar.__all__ if name.endswith("Error")]
    assert all(issubclass(error, simpar.SimparError) and issubclass(error, ValueError) for error in errors)
