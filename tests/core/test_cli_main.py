"""The command line's last resort: what nobody foresaw, and what a peer may have put into a message."""

from __future__ import annotations

import pytest

from fusion_node.cli import main as cli
from fusion_node.errors import NoRoute


def end_of(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    def fails() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.delenv("FUSION_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_unforeseen_error_is_told_by_its_class_and_not_by_a_message_that_may_quote_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = end_of(ValueError("cannot encode 'my secret prompt'"), monkeypatch, capsys)
    assert status == 70
    assert "ValueError" in told
    assert "FUSION_DEBUG=1" in told
    assert "secret" not in told


def test_control_characters_of_a_peer_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = end_of(NoRoute("cannot connect to \x1b]0;owned\x07:1"), monkeypatch, capsys)
    assert status == 7
    assert told == "error: cannot connect to ?]0;owned?:1\n"
