"""`zlab doctor --bundle` writes what an issue needs, and no secret of the records, logs and variables."""

from __future__ import annotations

import getpass
import json
import socket
import zipfile
from pathlib import Path

import pytest

from orchestrator.commands import doctor

SECRETS = {
    "a variable": ("HF_TOKEN", "zq1-variable"),
    "a key of JSON": ('"api_key": "zq2-json"', "zq2-json"),
    "a word and its value": ('["--hub-token", "zq3-word"]', "zq3-word"),
    "an address": ("http://ann:zq4-uri@tracking.example/", "zq4-uri"),
    "a query": ("http://tracking.example/?access_key=zq5-query&x=1", "zq5-query"),
    "a header": ("Authorization: Bearer zq6-header", "zq6-header"),
    "a token by its form": ("the hub said hf_zq7formformform", "hf_zq7formformform"),
    "a password": ("password=zq8-password", "zq8-password"),
    "another home": ("/home/zq9-user/data", "zq9-user"),
}


def test_no_secret_and_no_name_is_in_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "zq-home"
    output, attempt = home / "outputs", home / "outputs/points/abc/attempts/1"
    attempt.mkdir(parents=True)
    (attempt / "git.diff").write_text("left out", encoding="utf-8")
    (attempt / "state.json").write_text(json.dumps({"state": "error", "message": "rank 1 hangs"}), encoding="utf-8")
    machine = [f"{home}/x", f"user {getpass.getuser()}", f"on {socket.gethostname()}:", "tokens_per_second: 12.5"]
    lines = [*(text for text, _ in SECRETS.values()), SECRETS["a variable"][1], *machine]
    (attempt / "rank0.log").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv(*SECRETS["a variable"])
    file = tmp_path / "bundle.zip"
    assert doctor.main(["--output", str(output), "--bundle", str(file)]) == 0
    shown = capsys.readouterr().out
    with zipfile.ZipFile(file) as bundle:
        found = {name: bundle.read(name).decode() for name in bundle.namelist()}
    names = {"doctor.txt", "versions.json", *(f"points/abc/attempts/1/{name}" for name in ("rank0.log", "state.json"))}
    assert set(found) == names
    assert all(name in shown for name in names)
    every = "\n".join([*found, *found.values()])
    assert not [kind for kind, (_, secret) in SECRETS.items() if secret in every]
    assert str(home) not in every
    assert socket.gethostname() not in every
    assert "~/x\nuser USER\non HOST:\ntokens_per_second: 12.5" in found["points/abc/attempts/1/rank0.log"]
    assert "rank 1 hangs" in every
    assert "less" in shown
