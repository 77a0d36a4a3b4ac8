"""The command line: ``aotlab demo``, ``lab``, ``verify``, ``fuzz``, ``bench``, ``acceptance`` and ``doctor``.

``python -m aotlab`` is the same.

Here arguments become calls and results exit statuses; the work is done elsewhere and imported by the
command that needs it, so that ``aotlab --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aotlab import __version__, config
from aotlab.errors import AotlabError, UsageError

#: Exit statuses: everything right; something failed or did not verify; the command line was wrong; ctrl-C.
OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

_Command = Callable[[argparse.Namespace, Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Parameters
    ----------
    argv
        The arguments after the program's name; ``sys.argv[1:]`` if not given.

    Returns
    -------
    int
        0 if all went well, 1 if something failed or did not verify, 2 for a wrong command line, 130 after ctrl-C.

    Raises
    ------
    SystemExit
        From argparse, after ``--help``, ``--version`` or a wrong command line.
    """
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    # What stands behind `aotlab lab … --` is JupyterLab's; argparse would take it for a folder's name.
    end = words.index("--") if words[:1] == ["lab"] and "--" in words else len(words)
    options, rest = parser.parse_known_args(words[:end])
    command: _Command = options.command
    if rest and not options.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return command(options, [*rest, *words[end + 1 :]])
    except UsageError as error:
        print(f"aotlab: {error}", file=sys.stderr)
        return WRONG_USAGE
    except AotlabError as error:
        print(f"aotlab: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("aotlab: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aotlab",
        description="Ahead-of-time autograd for PyTorch that can be read, run and looked at.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aotlab {__version__}")
    parser.set_defaults(takes_more=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="compile a transformer's training step and a function full of mutation; show what happened",
        description="Compile a training step of a small transformer encoder and a function full of mutation and "
        "aliasing, verify both against eager, time them beside eager and stock torch.compile, print the tables and "
        "write the report. The exit status is 1 if anything failed to verify.",
    )
    demo.add_argument("--device", type=_device, default="auto", help="auto (default), cpu, cuda or cuda:N")
    demo.add_argument(
        "--backend", choices=["inductor", "eager"], default="inductor", help="what runs the graphs (default: inductor)"
    )
    demo.add_argument("--json", type=Path, metavar="PATH", help="write the report's JSON here, too")
    demo.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        default=Path("aotlab-report.html"),
        help="where to write the HTML report (default: ./aotlab-report.html)",
    )
    demo.add_argument(
        "--rehearse", metavar="CARD", help="compile for a GPU that is not here (h100, …) instead, and show its kernels"
    )
    demo.set_defaults(command=_demo)

    lab = commands.add_parser(
        "lab",
        allow_abbrev=False,
        usage="aotlab lab [DIR] [--port PORT] [--no-browser] [-- ...]",
        help="open JupyterLab on the course",
        description="Open JupyterLab on the course. In a checkout that is the folder notebooks/ itself; an installed "
        "aotlab copies its notebooks to ./aotlab-notebooks, where files that you changed stay as they are. JupyterLab "
        "listens on this machine only. Ctrl-C ends it.",
        epilog="What stands behind -- goes to JupyterLab.",
    )
    lab.add_argument("directory", type=Path, metavar="DIR", nargs="?", help="copy the notebooks to this folder")
    lab.add_argument("--port", type=_port, help="the port to listen on (default: the first free one from 8888)")
    lab.add_argument("--no-browser", action="store_true", help="open no browser; the address is printed")
    lab.set_defaults(command=_lab)

    verify = commands.add_parser(
        "verify", allow_abbrev=False, help="compare with eager", description="Compare with eager."
    )
    subjects = verify.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    ops = subjects.add_parser(
        "ops",
        allow_abbrev=False,
        help="every operator and module of which torch ships samples",
        description="Run every operator and module of which torch ships samples, forward and backward, through aotlab "
        "and through eager, and compare everything observable. The table counts the outcomes and names each variant "
        "that is not equal, with its reason. The exit status is 1 if a value is wrong or a process crashed. Needs the "
        "extra `ops`.",
    )
    ops.add_argument("--sample", action="store_true", help="only the 300 variants that the test-suite runs")
    ops.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only these: add, nn.Linear, 'add out int64'"
    )
    ops.add_argument("--thorough", action="store_true", help="all samples instead of a few of each kind; takes hours")
    ops.add_argument("--dynamo", action="store_true", help="behind torch.compile; what Dynamo alone does counts apart")
    ops.add_argument("--sizes", action="store_true", help="each compiled for all sizes of its arguments at once")
    ops.add_argument(
        "--errors",
        action="store_true",
        help="in place of values, the errors: each operator called as eager refuses it, with the result unused",
    )
    ops.add_argument("--jobs", type=_jobs, default=1, help="how many processes (default: 1)")
    ops.add_argument("--json", type=Path, metavar="PATH", help="write the results here, too")
    ops.set_defaults(command=_verify_ops)

    _add_fuzz(commands)
    bench = commands.add_parser("bench", allow_abbrev=False, help="measure", description="Measure.")
    suites = bench.add_subparsers(title="suites", metavar="SUITE", required=True)
    engine = suites.add_parser(
        "engine", add_help=False, help="trace time and call overhead of aotlab and upstream, alternating in one run"
    )
    engine.set_defaults(command=_bench_engine, takes_more=True)
    models = suites.add_parser(
        "models", add_help=False, help="real models trained for ten steps by aotlab, eager and stock torch.compile"
    )
    models.set_defaults(command=_bench_models, takes_more=True)
    symbolic = suites.add_parser(
        "symbolic", add_help=False, help="what sizes that vary cost over static ones: trace time and calls"
    )
    symbolic.set_defaults(command=_bench_symbolic, takes_more=True)
    partitioners = suites.add_parser(
        "partitioners", add_help=False, help="aotlab's partitioners and upstream's: their time, and what they keep"
    )
    partitioners.set_defaults(command=_bench_partitioners, takes_more=True)

    acceptance = commands.add_parser(
        "acceptance",
        allow_abbrev=False,
        help="everything that a device itself can show, in a few minutes",
        description="Run aotlab on a device: the demo, random numbers, mutation and aliases, models beside eager and "
        "torch.compile, memory, times, streams, and whether a compiled call ever waits for the device. Writes "
        "acceptance.json and a page, acceptance.html. The exit status is 1 if a check failed. Needs no Jupyter.",
    )
    acceptance.add_argument("--device", default="cuda", help="cuda (default), cuda:1, … or cpu")
    acceptance.add_argument(
        "--to", type=Path, default=Path("acceptance"), metavar="FOLDER", help="where to write (default: acceptance)"
    )
    acceptance.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="only these: demo, 'random numbers'")
    acceptance.set_defaults(command=_acceptance)

    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="check this machine and installation",
        description="Check what aotlab needs on this machine and say what to do about what is missing. The exit "
        "status is 1 if there is a problem.",
    )
    doctor.add_argument("--quick", action="store_true", help="do not try Inductor, which can take a minute")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_fuzz(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    fuzz = commands.add_parser(
        "fuzz",
        allow_abbrev=False,
        help="run random programs on an engine and compare with eager",
        description="Draw small programs of views, in-place ops, aliases and grad modes, run them eagerly and on an "
        "engine, and compare all that is observable. Failures are shrunk and saved as notebook cells. A run that was "
        "stopped goes on where it was. The exit status is 1 if anything failed. Needs Hypothesis: "
        "pip install 'aotlab[fuzz]'.",
    )
    fuzz.add_argument("--engine", choices=["aotlab", "upstream"], default="aotlab", help="default: aotlab")
    fuzz.add_argument("--programs", type=_count, default=1000, metavar="N", help="how many (default: 1000)")
    fuzz.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    fuzz.add_argument("--minutes", type=float, metavar="M", help="stop after so many")
    fuzz.add_argument("--grad", action="store_true", help="only programs with something to differentiate")
    fuzz.add_argument("--dynamo", action="store_true", help="behind torch.compile")
    fuzz.add_argument("--min-cut", action="store_true", help="with the partitioner that computes again (aotlab only)")
    fuzz.add_argument("--related", action="store_true", help="short programs about two inputs that share something")
    fuzz.add_argument("--subclasses", action="store_true", help="arguments are tensor subclasses (torch's TwoTensor)")
    fuzz.add_argument("--sizes", action="store_true", help="called with several sizes, compiled once for all of them")
    fuzz.add_argument(
        "--without", nargs="+", default=[], metavar="QUIRK", help="with these quirks switched off, or all"
    )
    fuzz.add_argument("--jobs", type=_count, default=1, help="processes (default: 1)")
    fuzz.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        default=Path("aotlab-fuzz"),
        help="for failures and for the state by which a run goes on (default: ./aotlab-fuzz)",
    )
    fuzz.add_argument("--shrink", type=float, default=20.0, metavar="S", help="seconds for one failure (default: 20)")
    fuzz.add_argument("--json", type=Path, metavar="PATH", help="write the table as JSON here; - for stdout instead")
    fuzz.add_argument("--corpus", type=Path, metavar="FILE", help="add finished blocks to the counts in this file")
    fuzz.add_argument("--carried", action="store_true", help="run nothing; print the total of --corpus")
    fuzz.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None, help="default: on a terminal only"
    )
    fuzz.set_defaults(command=_fuzz)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: a whole number from 1 on")
    return int(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda, cuda:N")
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 1 to 65535")
    return int(text)


def _jobs(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes")
    return int(text)


def _demo(options: argparse.Namespace, _rest: Sequence[str]) -> int:
    # What can be told from the command line alone is told before torch and the demo are loaded, which takes a while.
    for path in (options.json, options.html):
        _check_writable(path)
    if options.device.startswith("cuda"):
        _check_cuda(options.device)
    from aotlab.cli import demo

    if options.rehearse is not None:
        return demo.rehearse(options.rehearse, json_path=options.json, html_path=options.html, out=sys.stdout)
    return demo.run(
        device=options.device,
        backend=options.backend,
        json_path=options.json,
        html_path=options.html,
        out=sys.stdout,
    )


def _check_writable(path: Path | None) -> None:
    """Raise an error if a file could not be written at ``path``."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: permission denied")


def _check_cuda(device: str) -> None:
    """Raise an error if the installed torch has no CUDA, or the machine no such device."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if installed.endswith("+cpu"):
        raise UsageError(f"--device {device}: torch {installed} is built without CUDA; use --device cpu")
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"--device {device}: there is no cuda device here (torch.cuda.is_available() is False); use --device cpu"
        )
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise UsageError(f"--device {device}: there is no such device; the last one here is cuda:{count - 1}")


def _lab(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from aotlab.cli import lab

    return lab.run(
        directory=options.directory, port=options.port, browser=not options.no_browser, more=rest, out=sys.stdout
    )


def _fuzz(options: argparse.Namespace, _rest: Sequence[str]) -> int:
    if options.carried and options.corpus is None:
        raise UsageError("--carried prints the total of a file of counts; name it with --corpus")
    if options.related and options.grad:
        raise UsageError("--related programs nearly all have something to differentiate; leave out --grad")
    if options.sizes and (options.related or options.engine != "aotlab"):
        raise UsageError("--sizes draws programs of its own for aotlab; leave out --related and --engine")
    if options.subclasses and options.related:
        raise UsageError("--related draws programs of its own; leave it out, or --subclasses")
    if options.min_cut and options.engine != "aotlab":
        raise UsageError("--min-cut chooses aotlab's partitioner; leave out --engine")
    unknown = sorted({*options.without} - {*config.quirks, "all"})
    if unknown:
        raise UsageError(f"there is no quirk {unknown[0]!r}; there are {', '.join(config.quirks)}")
    try:
        import hypothesis  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise UsageError("fuzz needs Hypothesis: pip install 'aotlab[fuzz]'") from error
    from aotlab.verification.fuzz import corpus
    from aotlab.verification.fuzz.plan import Plan
    from aotlab.verification.fuzz.run import carried_text, run

    if options.carried:
        print(carried_text(options.engine, *corpus.carried(corpus.load(options.corpus), options.engine)))
        return OK
    plan = Plan(
        engine=options.engine,
        programs=options.programs,
        seed=options.seed,
        grad=options.grad,
        dynamo=options.dynamo,
        min_cut=options.min_cut,
        related=options.related,
        sizes=options.sizes,
        subclasses=options.subclasses,
        without=config.quirks if options.without == ["all"] else tuple(options.without),
    )
    return run(
        plan,
        save=options.save,
        out=sys.stdout,
        err=sys.stderr,
        minutes=options.minutes,
        jobs=options.jobs,
        shrink=options.shrink,
        json_path=options.json,
        corpus_file=options.corpus,
        progress=options.progress,
    )


def _verify_ops(options: argparse.Namespace, _rest: Sequence[str]) -> int:
    from aotlab.verification import op_database

    return op_database.run(
        sample=options.sample,
        only=options.only,
        thorough=options.thorough,
        jobs=options.jobs,
        json_path=options.json,
        out=sys.stdout,
        dynamo=options.dynamo,
        sizes=options.sizes,
        errors=options.errors,
    )


def _bench_engine(_options: argparse.Namespace, rest: Sequence[str]) -> int:
    from aotlab.bench import suite

    return suite.main(["engine", *rest])


def _bench_models(_options: argparse.Namespace, rest: Sequence[str]) -> int:
    from aotlab.bench import training

    return training.main(rest)


def _bench_symbolic(_options: argparse.Namespace, rest: Sequence[str]) -> int:
    from aotlab.bench import symbolic

    return symbolic.main(rest)


def _bench_partitioners(_options: argparse.Namespace, rest: Sequence[str]) -> int:
    from aotlab.bench import partitioners

    return partitioners.main(rest)


def _acceptance(options: argparse.Namespace, _rest: Sequence[str]) -> int:
    if options.device.partition(":")[0] == "cuda":
        _check_cuda(options.device)
    from aotlab.cli import acceptance

    return acceptance.run(options.device, options.to, options.only, sys.stdout)


def _doctor(options: argparse.Namespace, _rest: Sequence[str]) -> int:
    from aotlab.cli import doctor

    return doctor.run(quick=options.quick, out=sys.stdout)
