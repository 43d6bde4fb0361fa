"""Files that users name: whatever lies there, the answer is one sentence, and it comes at once."""

import json
import os
from pathlib import Path

import pytest

from simpar.errors import SimparError
from simpar.framework.framework import load_framework
from simpar.hardware.device import load_device
from simpar.hardware.graph import Graph
from simpar.hardware.profile import load_profile
from simpar.job import read_model
from simpar.plan.samples import Data
from simpar.reading import read_json, read_text
from simpar.schedule.text import read_csv
from simpar.validation.runs import read_runs

READERS = {
    "graph": Graph.model_validate,
    "profile": load_profile,
    "model": read_model,
    "device": load_device,
    "framework": load_framework,
    "lengths": lambda path: Data(lengths=path).read(),
    "runs": read_runs,
    "schedule": lambda path: read_csv(path, pp=2, microbatches=4, chunks=1),
}
JSON_READERS = ("graph", "profile", "model")
CONTENTS = {
    "no text": b"\xff\xfe\x00\x01",
    "zero bytes": b"\x00" * 100,
    "words": b"\xef\xbb\xbfhello\r\nworld\r\n",
    "deep": b"[" * 100_000,
    "digits": b'{"device": ' + b"9" * 5000 + b"}",
    "text": b'"a.json"',
    "number": b"NaN",
    "links": b'{"nodes": [5], "links": [5]}',
    "no links": b'{"nodes": null, "links": null}',
    "lists": b"[[[[1]]]]",
}


def answer(reader: str, path: str) -> str:
    with pytest.raises(SimparError) as caught:
        READERS[reader](path)
    return str(caught.value)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_such_file_is_told_in_a_sentence(reader: str, content: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if reader == "lengths" and content == "number":
        content = "words"
    Path("a.json").write_bytes(CONTENTS[content])
    text = answer(reader, "a.json")
    assert 10 < len(text) < 600
    assert not any(word in text for word in ("Traceback", "set_int_max_str_digits", "object at 0x", "codec"))


@pytest.mark.parametrize("reader", READERS)
def test_what_never_ends_is_not_waited_for(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.json")
    Path("zero.json").symlink_to("/dev/zero")
    Path("circle.json").symlink_to("circle.json")
    for name in ("pipe.json", "zero.json"):
        assert "is no file of at most" in answer(reader, name)
    for name in ("circle.json", "absent.json"):
        answer(reader, name)
    Path("folder.json").mkdir()
    answer(reader, "folder.json")


def test_text_and_json_of_good_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"a": [1, 2.5, None, "ü"]}
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(json.dumps(value, ensure_ascii=False), encoding=encoding)
        assert read_json(read_text(path)) == value
