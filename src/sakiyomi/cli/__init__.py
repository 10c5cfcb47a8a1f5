"""The command line: ``sakiyomi demo | generate | transcribe | chat | tree | audit | info | models | plan | serve |
batch | bench | memory | cache | tune | export | import | train``.

Results on stdout, progress on stderr, ``--json`` everywhere (the last line of stdout is then one JSON object). Exit
codes: 0, 1 for what cannot be done (and a defect found by ``audit``), 2 for misuse, 130 after Ctrl-C. Nothing here
imports torch before a command runs, so that ``--help`` comes at once.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from sakiyomi.cli import (
    audit,
    batch,
    bench,
    cache,
    chat,
    demo,
    export,
    generate,
    import_,
    info,
    memory,
    models,
    plan,
    serve,
    train,
    transcribe,
    tree,
    tune,
)
from sakiyomi.cli.common import INTERRUPTED, add_command, add_group
from sakiyomi.cli.help import SectionsGroup
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.memory import no_memory
from sakiyomi.core.version import __version__
from sakiyomi.scale.cluster import MAX_BATCH

__all__ = ["app", "main"]
EXAMPLE = 'Example: sakiyomi demo; then sakiyomi generate "Once upon a time" --model FOLDER'
REMEDY = "close other programs, choose a smaller model, or, where the command has them, --quantize int4 or --offload"


class _Group(SectionsGroup):
    """Prints an error that a user can cause as one line on stderr, and exits with its code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SakiyomiError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            _restore_terminal()
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if (short := no_memory(error, "the command", REMEDY)) is None:
                raise
            typer.echo(f"error: {short.message}", err=True)
            raise typer.Exit(short.exit_code) from None


# Plain help, in sections without boxes: it reads the same on a screen, in a pipe and on the page of commands.
app = typer.Typer(name="sakiyomi", cls=_Group, no_args_is_help=True, rich_markup_mode=None, epilog=EXAMPLE)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sakiyomi {__version__}")
        raise typer.Exit


@app.callback()
def _sakiyomi(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Faster text from the language model you already have, with the same output."""


add_command(app, demo.demo)
add_command(app, generate.generate)
add_command(app, transcribe.transcribe, defaults={"target": MISSING})  # no embedded model takes sound
add_command(app, chat.chat, defaults={"max_new_tokens": chat.MAX_NEW_TOKENS})
add_command(app, tree.tree)
add_command(app, audit.audit)
add_command(app, info.info)
add_command(app, models.models)
add_command(app, plan.plan)
add_command(app, serve.serve, defaults={"max_batch": MAX_BATCH})
add_command(app, batch.batch, defaults={"max_batch": MAX_BATCH})
add_command(app, batch.run_batch, name="run-batch", defaults={"max_batch": MAX_BATCH})
_benches = (bench.card, bench.locret, bench.long, bench.report, bench.tasks)
_bench = add_group(app, "bench", *_benches, main=bench.bench)
add_group(_bench, "spec", bench.compare, bench.merge, main=bench.spec)
add_group(app, "memory", memory.show, memory.clear, help="What the draft suffix:FILE remembers of earlier requests.")
_cache = add_group(app, "cache", help="Prompt caches: documents and system prompts that are prefilled once.")
add_command(_cache, cache.build, defaults={"draft": "none"})
add_command(_cache, cache.info)
add_group(app, "tune", tune.medusa, main=tune.pair)
add_group(
    app,
    "export",
    export.gguf,
    export.medusa,
    export.speculators,
    export.stages,
    help="Export models and trained heads to other tools; cut a model.",
)
add_group(app, "import", import_.ct2, import_.ggml, help="Import models of other tools.")
app.add_typer(train.app, name="train")


def main() -> None:
    """Entry point of the ``sakiyomi`` command."""
    code = 0
    _speak_unicode()
    try:
        app([_as_text(argument) for argument in sys.argv[1:]], prog_name="sakiyomi")
    except OSError as error:
        if error.filename is not None:  # the error is of a file, not of the output
            raise
        code = _cannot_write(error)
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        # Between two of our own lines, or a second Ctrl-C.
        code = INTERRUPTED
    _leave(code)


def _leave(code: int) -> None:
    """End the process now, without waiting for a thread that may still compile kernels."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed before the process began
                stream.flush()
    except BrokenPipeError:
        # The reader went away (`| head`): not an error worth a traceback.
        code = code or 1
    except OSError as error:
        code = _cannot_write(error)
    if (peers := sys.modules.get("sakiyomi.core.peers")) is not None:
        peers.part()
    if "torch" in sys.modules or code == INTERRUPTED:  # Python itself may end by the signal, which is another code
        os._exit(code)
    sys.exit(code)


def _restore_terminal() -> None:
    """End the line, and reset colour and cursor."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and stream.isatty():
            stream.write("\x1b[0m\x1b[?25h")
            stream.flush()
    if sys.stdout is not None and sys.stdout.isatty():
        typer.echo()


def _speak_unicode() -> None:
    """Write UTF-8 even if the locale is ASCII: texts of models are Unicode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8", errors="replace")


def _as_text(argument: str) -> str:
    """An argument that an ASCII locale has decoded with surrogates, as text."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def _cannot_write(error: OSError) -> int:
    """Report that the output cannot be written, if stderr works; gives the exit code."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"error: the output cannot be written: {error.strerror or error}\n")
        sys.stderr.flush()
    return 1
