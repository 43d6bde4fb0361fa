"""Options and paths that all tests share; being here, it also puts this folder on the path of the tests."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from simpar.cli import main


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected outputs with what comes out now")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


# ---- the command in a folder of its own -----------------------------------------------------------------------------


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


@pytest.fixture
def job_text() -> str:
    """What job.yaml holds; a module with another job overrides it."""
    return "model: gpt2\ncluster: h100-sxm:1x8\nplan:\n  zero: 1\n  micro_batch: 4\n"


@pytest.fixture
def said(
    job_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Runs the command in a folder that holds job.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(job_text, encoding="utf-8")

    def run(*words: str) -> Said:
        code = main(words)
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return run
