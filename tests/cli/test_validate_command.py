"""``simpar validate`` on terminals of any width."""

import re
from pathlib import Path
from typing import Any

import pytest

from simpar.cli import validate

SAMPLE = Path(__file__).parents[1] / "validation" / "sample.csv"


@pytest.fixture
def job_text() -> str:
    return ""


@pytest.mark.parametrize("width", [80, 110])
def test_a_narrow_terminal_shows_whole_figures(said: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    Path("runs.csv").write_text("\n".join([lines[0], *lines[1:60:6]]) + "\n", encoding="utf-8")
    whole = said("validate", "runs.csv", "--workers", "1").out
    from rich.console import Console  # noqa: PLC0415

    narrow = Console(width=width, highlight=False)
    monkeypatch.setattr(validate, "console", lambda: narrow)
    monkeypatch.setattr(validate, "show", narrow.print)
    code, out, _ = said("validate", "runs.csv", "--workers", "1")
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    assert "left out for want of width: " in out
    assert "left out" not in whole
    off = [float(found) for found in re.findall(r"([-+][\d.]+)% │$", out, re.MULTILINE)]
    assert len(off) == 10
    assert sorted(off, key=abs, reverse=True) == off


def test_a_table_of_which_nothing_is_predicted_ends_with_2(said: Any) -> None:
    rows = ["id,framework,model,gpu,num_gpus,seq_len,step_time_s", "a,pytorch,nobody-8b,h100-sxm,8,2048,1"]
    Path("runs.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    code, out, _ = said("validate", "runs.csv", "--workers", "1")
    assert code == 2
    assert "does not state layers, hidden, heads, vocab" in " ".join(out.split())
    Path("runs.csv").write_text("\n".join(row.replace(",", ";") for row in rows) + "\n", encoding="utf-8")
    code, _, err = said("validate", "runs.csv", "--workers", "1")
    assert code == 2
    assert "runs.csv: separates its cells by ';', but a CSV does so by ','" in err
