"""``dspark VERB ...``: one program, one module a verb, loaded when it is asked for.

A verb module offers ``add_arguments(parser)`` and ``run(args) -> int`` (the exit status); its docstring is the help
text, with an example. Exit statuses:

- 0: done;
- 2: bad usage, configuration or input: ``ValueError`` or ``OSError``, one line on stderr, no traceback;
- 1: failed while running: everything else, and whatever happens inside :func:`running`;
- 130: interrupted; 143: ended by SIGTERM.

Every rank of a job ends with the same status where all see the mistake; rank 0 alone prints, except for a mistake that
other ranks may not know of.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from ..parallel.environment import LaunchError
from ..parallel.launch import report
from ..parallel.monitor import JobEnded
from ..parallel.roll_call import AgreedError
from .results_file import OutputFailed

VERBS: dict[str, tuple[str, str]] = {
    "topology": (".verbs.topology", "rank tables of a layout, without starting it"),
    "check": (".verbs.check", "read a checkpoint's headers: everything there, fits, memory per rank"),
    "generate": (".verbs.generate", "decode prompts"),
    "eplb": (".verbs.eplb", "place experts: inspect, plan, diff, migrate, simulate, convert, validate"),
    "profile-sps": (".verbs.profile_sps", "measure steps a second against verified rows, for --sps-table"),
    "calibrate": (".verbs.calibrate", "fit the temperatures of a draft's confidences, for --sts"),
    "train-draft": (".verbs.train_draft", "train a draft for a target: dspark, dflash, mtp, eagle3"),
    "score": (".verbs.score", "log-probabilities of given tokens"),
    "dry-run": (".verbs.dry_run", "what a command would be on a cluster: layout, groups, memory per rank"),
    "bench": (".verbs.bench", "speed and memory against a stated baseline"),
}

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143

# Where the launchers (torchrun, Open MPI, MPICH, Slurm) put the rank; only for who may print before a job is joined.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class Terminated(KeyboardInterrupt):
    """SIGTERM came: as an interruption, but with its own exit status."""

    signal_number = signal.SIGTERM


class RunError(RuntimeError):
    """The work itself failed, after the input was found good; the cause is chained."""


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Inside, inputs are already checked: any exception is a failure of the run (status 1), not of its usage."""
    try:
        yield
    except (BrokenPipeError, OutputFailed):
        raise
    except Exception as error:
        raise RunError(f"{type(error).__name__}: {error}") from error


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are a ``ValueError``, so that they end as one line like every other."""

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError`` instead of printing the usage and exiting."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    rank = rank_from(os.environ)
    with logging_to_stderr(rank), _terminable():
        return _main(rank, sys.argv[1:] if argv is None else list(argv))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM unwinds the program as Ctrl-C does. Only the main thread can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _main(rank: int, argv: list[str]) -> int:
    try:
        try:
            return _dispatch(argv)
        except LaunchError as error:
            _say_mistake(rank, error)
            report(error)  # this may take seconds
            return EXIT_USAGE
    except JobEnded as ended:  # its guard has said why
        return ended.verdict.status
    except Terminated:
        _say(rank, "dspark: terminated")
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        _say(rank, "dspark: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout went away (``| head``): nothing to report, and nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OutputFailed as error:
        _say(rank, f"dspark: error: {error}")
        return EXIT_FAILED
    except TimeoutError as error:  # ranks did not meet, so each has to speak for itself
        print(f"dspark: error: rank {rank}: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except (ValueError, OSError) as error:
        _say_mistake(rank, error)
        return EXIT_USAGE
    except Exception:
        logging.getLogger(__package__).exception("failed while running")
        return EXIT_FAILED


def _dispatch(argv: list[str]) -> int:
    names = ", ".join(VERBS)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return EXIT_OK if argv else EXIT_USAGE
    if argv[0] == "--version":
        print(f"dspark {importlib.metadata.version('dspark')}")
        return EXIT_OK
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}; there are {names}")
    module = importlib.import_module(VERBS[verb][0], __package__)
    parser = Parser(
        prog=f"dspark {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(rest))


def _overview() -> str:
    lines = ["usage: dspark VERB [options]        (also: python -m dspark.runtime VERB ...)", "", "verbs:"]
    lines += [f"  {name:<10} {about}" for name, (_, about) in VERBS.items()]
    lines += ["", "several ranks: torchrun --nproc-per-node 2 -m dspark.runtime generate --prompt 'Once upon a time'"]
    lines += ["dspark VERB --help explains a verb and shows an example"]
    return "\n".join(lines)


def rank_from(environment: Mapping[str, str]) -> int:
    """The rank a launcher gave this process, 0 without a launcher."""
    for name in RANK_VARIABLES:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


@contextlib.contextmanager
def logging_to_stderr(rank: int) -> Iterator[None]:
    """Inside, the package's log records go to stderr with the rank in front: notices of rank 0, warnings of all."""
    logger = logging.getLogger(__package__.partition(".")[0])
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[{rank}] %(levelname)s %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def _say_mistake(rank: int, error: Exception) -> None:
    text = " ".join(str(error).split())
    if rank == 0:
        print(f"dspark: error: {text}", file=sys.stderr, flush=True)
    elif not isinstance(error, AgreedError):  # rank 0 may not know of it
        print(f"dspark: error: rank {rank} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
