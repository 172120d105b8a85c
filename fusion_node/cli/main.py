"""``fusion-node``: the command line. Commands import what is heavy only when they run, so that --help is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import fusion_node
from fusion_node.cli.audit import audit
from fusion_node.cli.ban import ban, bans, unban
from fusion_node.cli.control import pause, resume
from fusion_node.cli.demo import demo
from fusion_node.cli.doctor import doctor
from fusion_node.cli.draft import draft_app
from fusion_node.cli.identity import show_id
from fusion_node.cli.invite import invite
from fusion_node.cli.join import join
from fusion_node.cli.models import models_app
from fusion_node.cli.peers import peers
from fusion_node.cli.place import place
from fusion_node.cli.plan import plan
from fusion_node.cli.privacy import privacy_report
from fusion_node.cli.serve import serve
from fusion_node.cli.simulate import simulate
from fusion_node.cli.status import status
from fusion_node.cli.talk import chat, generate
from fusion_node.errors import FusionError
from fusion_node.wire import printable

app = typer.Typer(
    name="fusion-node",
    help="Serve a part of a large open-weight model, and use a swarm of such parts as one model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(models_app, name="models")
app.add_typer(draft_app, name="draft")
app.command()(demo)
app.command()(join)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(status)
app.command()(plan)
app.command()(privacy_report)
app.command()(place)
app.command()(simulate)
app.command()(audit)
app.command()(invite)
app.command()(peers)
app.command(name="id")(show_id)
app.command()(doctor)
app.command()(ban)
app.command()(unban)
app.command()(bans)
app.command()(pause)
app.command()(resume)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fusion-node {fusion_node.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point. Every error that the program understands is one line and has its own exit status."""
    try:
        app()
    except FusionError as error:
        # Parts of a message may be a peer's: no control character of it reaches the terminal.
        _end(f"error: {printable(str(error), limit=2000)}", error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has enough of it, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if os.environ.get("FUSION_DEBUG"):
            raise
        # Its class only: a message of a library may quote what it was given, and that may be a prompt.
        _end(f"error: unexpected {type(error).__name__} (set FUSION_DEBUG=1 for details; please report it)", 70)


def _end(message: str, status: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
