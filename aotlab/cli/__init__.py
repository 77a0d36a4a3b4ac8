"""The command line: ``aotlab demo``, ``lab``, ``run``, ``report``, ``verify`` and the other commands.

``python -m aotlab`` is the same.

This module turns arguments into calls, and results into exit statuses. Each command imports the modules that do its
work when it runs, so that ``aotlab --help`` answers immediately.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

from aotlab import __version__, config
from aotlab.cli import running, stored
from aotlab.cli.arguments import add_report_files, check_writable, count, device, jobs, port, report_files
from aotlab.errors import AotlabError, UsageError

#: Exit statuses: success; something failed or did not verify; the command line was wrong; ctrl-C.
OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

_Command = Callable[[argparse.Namespace, Sequence[str]], int]
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Parameters
    ----------
    argv
        The arguments after the program's name. If None, ``sys.argv[1:]`` is used.

    Returns
    -------
    int
        0 on success, 1 if something failed or did not verify, 2 for a wrong command line, 130 after ctrl-C.

    Raises
    ------
    SystemExit
        From argparse, after ``--help``, ``--version`` or a wrong command line.
    """
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    # The arguments after `aotlab lab … --` are for JupyterLab. argparse would use the first of them as the folder DIR.
    end = words.index("--") if words[:1] == ["lab"] and "--" in words else len(words)
    options, other_arguments = parser.parse_known_args(words[:end])
    command: _Command = options.command
    if other_arguments and not options.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(other_arguments)}")
    try:
        return command(options, [*other_arguments, *words[end + 1 :]])
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
        description="An independent AOTAutograd for PyTorch, and a JupyterLab workbench that shows what it does.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aotlab {__version__}")
    parser.set_defaults(takes_more=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _add_demo,
        _add_lab,
        running.add,
        stored.add,
        _add_report,
        _add_verify,
        _add_fuzz,
        _add_bench,
        _add_acceptance,
        _add_doctor,
    ):
        add(commands)
    return parser


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="compile a transformer's training step and a function that mutates and aliases; show the results",
        description="Compile a training step of a small transformer encoder, and a function that mutates and aliases "
        "its arguments. Compare both with eager, time them against eager and stock torch.compile, print the tables and "
        "write the report. The exit status is 1 if a result differs from eager.",
    )
    demo.add_argument("--device", type=device, default="auto", help="auto (default), cpu, cuda or cuda:N")
    demo.add_argument(
        "--backend",
        choices=["inductor", "eager"],
        default="inductor",
        help="the compiler of the graphs (default: inductor)",
    )
    add_report_files(demo)
    demo.add_argument(
        "--rehearse",
        metavar="CARD",
        help="show the kernels for a GPU that this machine does not have (h100, …)",
    )
    demo.set_defaults(command=_demo)


def _add_lab(commands: _Commands) -> None:
    lab = commands.add_parser(
        "lab",
        allow_abbrev=False,
        usage="aotlab lab [DIR] [--port PORT] [--no-browser] [-- ...]",
        help="open JupyterLab on the course",
        description="Open JupyterLab on the course. In a checkout, it opens the folder notebooks/. An installed aotlab "
        "copies its notebooks to ./aotlab-notebooks first, and keeps the files that you changed. JupyterLab listens on "
        "this machine only. Ctrl-C ends it.",
        epilog="JupyterLab gets the arguments after --.",
    )
    lab.add_argument("directory", type=Path, metavar="DIR", nargs="?", help="copy the notebooks to this folder")
    lab.add_argument("--port", type=port, help="the port to listen on (default: the first free one from 8888)")
    lab.add_argument("--no-browser", action="store_true", help="open no browser; the address is printed")
    lab.set_defaults(command=_lab)


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="make a page from a folder with the reports of several ranks, or that TORCH_TRACE recorded",
        description="Read the reports that the ranks of a distributed job wrote into the folder with `aotlab run "
        "--ranks`, or the logs that stock torch.compile wrote into the folder TORCH_TRACE. Print a summary, and write "
        "the report as one HTML page. The machine needs neither the recorded program nor its GPU.",
    )
    report.add_argument("directory", type=Path, metavar="DIR", help="the folder, or one log file")
    add_report_files(report)
    report.set_defaults(command=_report)


def _add_verify(commands: _Commands) -> None:
    verify = commands.add_parser(
        "verify", allow_abbrev=False, help="compare with eager", description="Compare with eager."
    )
    subjects = verify.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    ops = subjects.add_parser(
        "ops",
        allow_abbrev=False,
        help="all operators and modules for which torch has samples",
        description="Run all operators and modules for which torch has samples, forward and backward, with aotlab and "
        "eagerly, and compare everything observable. The table counts the outcomes and names each variant that is not "
        "equal, with the reason. The exit status is 1 if a value is wrong or a process crashed. Needs the extra `ops`.",
    )
    ops.add_argument("--sample", action="store_true", help="run only the 300 variants of the test suite")
    ops.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="run only these, for example: add, nn.Linear, 'add out int64'",
    )
    ops.add_argument(
        "--thorough", action="store_true", help="run all samples, not only a few of each kind; takes hours"
    )
    ops.add_argument(
        "--dynamo",
        action="store_true",
        help="capture with torch.compile; differences made by Dynamo are counted separately",
    )
    ops.add_argument("--sizes", action="store_true", help="compile each call for all sizes of its arguments at once")
    ops.add_argument(
        "--errors",
        action="store_true",
        help="compare errors, not values: call each operator with arguments that eager rejects; its result is unused",
    )
    ops.add_argument("--jobs", type=jobs, default=1, help="number of processes (default: 1)")
    ops.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    ops.set_defaults(command=_verify_ops)


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser("bench", allow_abbrev=False, help="measure", description="Measure.")
    suites = bench.add_subparsers(title="suites", metavar="SUITE", required=True)
    engine = suites.add_parser(
        "engine", add_help=False, help="trace time and call overhead of aotlab and upstream, measured in turns"
    )
    engine.set_defaults(command=_bench_engine, takes_more=True)
    models = suites.add_parser(
        "models", add_help=False, help="ten training steps of real models with aotlab, eager and stock torch.compile"
    )
    models.set_defaults(command=_bench_models, takes_more=True)
    symbolic = suites.add_parser(
        "symbolic", add_help=False, help="trace time and call time with dynamic sizes, compared with static sizes"
    )
    symbolic.set_defaults(command=_bench_symbolic, takes_more=True)
    disk = suites.add_parser(
        "disk", add_help=False, help="first result of a second process, which finds Inductor's cache on disk"
    )
    disk.set_defaults(command=_bench_disk, takes_more=True)
    partitioners = suites.add_parser(
        "partitioners", add_help=False, help="time and saved memory of aotlab's and upstream's partitioners"
    )
    partitioners.set_defaults(command=_bench_partitioners, takes_more=True)
    cells = suites.add_parser(
        "cells",
        add_help=False,
        help="the first run of notebook cells with each frontend, eager and stock torch.compile",
    )
    cells.set_defaults(command=_bench_cells, takes_more=True)


def _add_acceptance(commands: _Commands) -> None:
    acceptance = commands.add_parser(
        "acceptance",
        allow_abbrev=False,
        help="run the checks that need a device; takes a few minutes",
        description="Run aotlab on a device and check the demo, random numbers, mutation and aliases, models (compared "
        "with eager and torch.compile), memory, times, streams, and that no compiled call waits for the device. Writes "
        "acceptance.json and the page acceptance.html. The exit status is 1 if a check failed. Needs no Jupyter.",
    )
    acceptance.add_argument("--device", default="cuda", help="cuda (default), cuda:1, … or cpu")
    acceptance.add_argument(
        "--to",
        type=Path,
        default=Path("acceptance"),
        metavar="FOLDER",
        help="the folder for the results (default: acceptance)",
    )
    acceptance.add_argument(
        "--only", nargs="+", default=[], metavar="CHECK", help="run only these, for example: demo, 'random numbers'"
    )
    acceptance.set_defaults(command=_acceptance)


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="check this machine and installation",
        description="Check the requirements of aotlab on this machine, and give a remedy for each missing one. The "
        "exit status is 1 if there is a problem.",
    )
    doctor.add_argument("--quick", action="store_true", help="do not try Inductor, which can take a minute")
    doctor.set_defaults(command=_doctor)


def _add_fuzz(commands: _Commands) -> None:
    fuzz = commands.add_parser(
        "fuzz",
        allow_abbrev=False,
        help="run random programs on an engine and compare with eager",
        description="Draw small programs of views, in-place ops, aliases and grad modes, run them eagerly and with an "
        "engine, and compare everything observable. Failures are shrunk and saved as notebook cells. A stopped run "
        "continues where it stopped. The exit status is 1 if a program failed. Needs Hypothesis: "
        "pip install 'aotlab[fuzz]'.",
    )
    fuzz.add_argument("--engine", choices=["aotlab", "upstream"], default="aotlab", help="default: aotlab")
    fuzz.add_argument("--programs", type=count, default=1000, metavar="N", help="number of programs (default: 1000)")
    fuzz.add_argument("--seed", type=int, default=0, help="the seed of the programs (default: 0)")
    fuzz.add_argument("--minutes", type=float, metavar="M", help="stop after this many minutes")
    fuzz.add_argument("--grad", action="store_true", help="only programs that can be differentiated")
    fuzz.add_argument("--dynamo", action="store_true", help="capture with torch.compile")
    fuzz.add_argument("--min-cut", action="store_true", help="use the partitioner that recomputes values (aotlab only)")
    fuzz.add_argument("--related", action="store_true", help="draw short programs about two related inputs")
    fuzz.add_argument("--subclasses", action="store_true", help="pass tensor subclasses (torch's TwoTensor)")
    fuzz.add_argument(
        "--sizes", action="store_true", help="call each program with several sizes, compiled once for all"
    )
    fuzz.add_argument(
        "--without", nargs="+", default=[], metavar="QUIRK", help="switch these quirks off, or `all` of them"
    )
    fuzz.add_argument("--jobs", type=count, default=1, help="number of processes (default: 1)")
    fuzz.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        default=Path("aotlab-fuzz"),
        help="the folder for failures and for the state of a stopped run (default: ./aotlab-fuzz)",
    )
    fuzz.add_argument(
        "--shrink", type=float, default=20.0, metavar="S", help="seconds to shrink one failure (default: 20)"
    )
    fuzz.add_argument("--json", type=Path, metavar="PATH", help="write the table as JSON to this file; - means stdout")
    fuzz.add_argument("--corpus", type=Path, metavar="FILE", help="add finished blocks to the counts in this file")
    fuzz.add_argument("--carried", action="store_true", help="run nothing; only print the total of --corpus")
    fuzz.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show the progress (default: on a terminal only)",
    )
    fuzz.set_defaults(command=_fuzz)


def _report(options: argparse.Namespace, _: Sequence[str]) -> int:
    json, html = report_files(options)
    from aotlab.cli.script import write
    from aotlab.report.gather import read_all
    from aotlab.upstream import read_trace

    write(read_all(options.directory) or [read_trace(options.directory)], json, html, sys.stdout)
    return OK


def _demo(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    # Check the command line first: loading torch and the demo takes a while.
    for path in (options.json, options.html):
        check_writable(path)
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


def _check_cuda(device: str) -> None:
    """Raise an error if the installed torch has no CUDA, or if the machine does not have this device."""
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


def _lab(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.cli import lab

    return lab.run(
        directory=options.directory,
        port=options.port,
        browser=not options.no_browser,
        server_arguments=arguments,
        out=sys.stdout,
    )


def _fuzz(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    if options.carried and options.corpus is None:
        raise UsageError("--carried prints the total of a file of counts; name this file with --corpus")
    if options.related and options.grad:
        raise UsageError("nearly all programs of --related can be differentiated; leave out --grad")
    if options.sizes and (options.related or options.engine != "aotlab"):
        raise UsageError("--sizes draws its own programs for aotlab; leave out --related and --engine")
    if options.subclasses and options.related:
        raise UsageError("--related draws its own programs; leave out --related or --subclasses")
    if options.min_cut and options.engine != "aotlab":
        raise UsageError("--min-cut chooses aotlab's partitioner; leave out --engine")
    unknown = sorted({*options.without} - {*config.quirks, "all"})
    if unknown:
        raise UsageError(f"there is no quirk {unknown[0]!r}; there are {', '.join(config.quirks)}")
    try:
        import hypothesis  # noqa: F401  # only to check that it is installed
    except ImportError as error:
        raise UsageError("fuzz needs Hypothesis: pip install 'aotlab[fuzz]'") from error
    from aotlab.maintenance.fuzz import corpus
    from aotlab.maintenance.fuzz.plan import Plan
    from aotlab.maintenance.fuzz.run import carried_text, run

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


def _verify_ops(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from aotlab.maintenance import op_database

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


def _bench_engine(_options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.maintenance.bench import suite

    return suite.main(["engine", *arguments])


def _bench_models(_options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.maintenance.bench import training

    return training.main(arguments)


def _bench_symbolic(_options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.maintenance.bench import symbolic

    return symbolic.main(arguments)


def _bench_disk(_options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.maintenance.bench import disk

    return disk.main(arguments)


def _bench_partitioners(_options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.maintenance.bench import partitioners

    return partitioners.main(arguments)


def _bench_cells(_options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from aotlab.notebook import cell_times

    return cell_times.main(arguments)


def _acceptance(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    if options.device.partition(":")[0] == "cuda":
        _check_cuda(options.device)
    from aotlab.maintenance import acceptance

    return acceptance.run(options.device, options.to, options.only, sys.stdout)


def _doctor(options: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from aotlab.cli import doctor

    return doctor.run(quick=options.quick, out=sys.stdout)
