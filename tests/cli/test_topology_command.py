import pytest

from simpar.cli.app import DONE, MISTAKE, main


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model: gpt2\ncluster: h100-sxm:2x2\nplan: {tp: 2}\n", encoding="utf-8")
    return path


def test_a_job_shows_how_busy_its_links_are(job, capsys):
    assert main(["topology", str(job)]) == DONE
    shown = capsys.readouterr().out
    assert "GPU to its node" in shown
    assert "NIC of a GPU" in shown
    assert "%" in shown


@pytest.mark.parametrize(
    ("spec", "words"),
    [("h100-sxm:4x8", ["4 × 8 h100-sxm", "49 GB/s a GPU"]), ("tpu-v5e:8x16", ["8×16 (open, closed)"])],
)
def test_a_cluster_shows_its_parts(spec, words, capsys):
    assert main(["topology", spec]) == DONE
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_it_is_drawn_as_a_page(job, tmp_path, capsys):
    page = tmp_path / "out.html"
    assert main(["topology", str(job), "--html", str(page), "--set", "plan.tp=1"]) == DONE
    assert f"wrote {page}" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h100-sxn:8"], "unknown device 'h100-sxn'; did you mean 'h100-sxm'?"),
        (["h100-sxm:8", "--set", "plan.tp=2"], "--set changes fields of a job, but the target is a cluster"),
        (["h100-sxm:8", "--html", "/no/such/folder/x.html"], "there is no folder '/no/such/folder'"),
        (["none.yaml"], "none.yaml: there is no such file"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(["topology", *arguments]) == MISTAKE
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
