"""Inductor's cache on disk: whether aotlab may use it, why a graph was not found in it, and how large it may become.

Inductor finds a compiled graph on disk by a key. The key is a hash of the graph, of its inputs, of all settings, and of
the versions of torch and of the machine's software. For each key, this module stores the hashes of these parts in a
JSON file beside the cache. When a graph is not in the cache, it compares the graph's key with the last keys that aotlab
stored, and names the parts that differ from the nearest one. The files only explain: no kernel is chosen by them.

Inductor never removes a file from its cache. `bound` removes the least recently used ones.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from aotlab import config
from aotlab.errors import RefusedError

ADVICE = "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
#: So many files are kept: those that were written last.
MOST = 64
_LARGEST = 200_000
_BEFORE = "this graph was cached before, but its file is missing, damaged or for other sizes"
#: So many differing parts are named.
_NAMED = 3
#: The files that may be removed: kernels and wrappers, graphs, and Triton's kernels. Their names contain hashes.
_REMOVABLE = {
    "[a-z2-7][a-z2-7]/c*": re.compile(r"(..)/c\1[a-z2-7]{49}\..+"),
    "fxgraph/??/*/*": re.compile(r"fxgraph/(..)/f\1[a-z2-7]{49}/[a-z2-7]+"),
    "triton/*/*/*": re.compile(r"triton/\d+/[A-Z2-7]{52}/.+"),
}
#: A file that was written in the last hour is kept, because a process may be about to load it.
_IN_USE = 3600.0
#: The time between two checks of the size, in seconds.
_INTERVAL = 600.0
_last_bound = -_INTERVAL
#: The system's errors for a disk that cannot be written.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_LINE = re.compile(r"\[(\w+)\] ([^:]+):")
_WORDS = {
    "torch_version": "torch's version",
    "cpp_runtime_thread_count": "the number of threads",
    "default_dtype": "torch's default dtype",
    "cuda_matmul_settings": "torch's settings of matrix products",
    "cache_key_tag": "aotlab's version or the outputs whose strides are kept",
    "system_info": "the machine",
    "deterministic_algorithms_settings": "torch's setting of deterministic algorithms",
}
_PATTERNS = (
    (r"example_inputs\[(\d+)\]", r"input \1 (its sizes, strides, dtype or device)"),
    (r"inductor_config\[(.+)\]", r"Inductor's setting `\1`"),
    (r"fx_kwargs\[(.+)\]", r"Inductor's argument `\1`"),
)


def cache_folder() -> Path:
    """Return the folder in which Inductor caches compiled code. Torch has no public function for this."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen:
        return Path(chosen)
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def is_ours() -> bool:
    """Tell whether Inductor's folder belongs to the user or to root, and is not world-writable.

    A compiled graph is a pickle, and loading a pickle can run any code. So aotlab does not load graphs from other
    folders, and warns once. On Windows, nothing is checked.
    """
    folder = cache_folder()
    problem = strangers(folder)
    if problem:
        _warn(f"aotlab does not load compiled graphs from {folder}, because {problem}; {ADVICE}")
    return not problem


def strangers(folder: Path) -> str:
    """Say in words that a folder belongs to another user or is world-writable. Otherwise return an empty text."""
    try:
        state = folder.stat()
    except OSError:
        return ""
    if os.name != "posix":
        return ""
    if state.st_uid not in (0, os.getuid()):
        return "it belongs to another user"
    return "every user can write to it" if state.st_mode & 0o002 else ""


@contextlib.contextmanager
def disk_needed() -> Iterator[None]:
    """Raise `RefusedError` if Inductor cannot write its files in a block, for example because the disk is full.

    Inductor's compilers write files even if the cache is switched off. So the call runs eagerly.
    """
    try:
        yield
    except Exception as error:
        problem = _disk_problem(error)
        if not problem:
            raise
        raise RefusedError(
            f"Inductor cannot write to {cache_folder()}",
            why=f"the system says {problem!r}",
            suggestion="free some space, or set TORCHINDUCTOR_CACHE_DIR to another folder",
        ) from error


def _disk_problem(error: BaseException | None) -> str:
    """Return the system's words if an error was caused by a disk that cannot be written, or an empty text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return os.strerror(error.errno)
        for number in _UNWRITABLE:  # a compiler that ran in another process has printed it
            if os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ""


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def miss(cache_key: tuple[str, Sequence[str]] | None) -> str:
    """Say why Inductor did not find a graph in its cache, and store the parts of the graph's key.

    ``cache_key`` is the key and Inductor's lines about it: the hash, the name and the text of each part. The result is
    empty if ``cache_key`` is None because no cache is used, or if the folder cannot be written to.
    """
    if cache_key is None:
        return ""
    folder, (key, details) = cache_folder() / "aotlab", cache_key
    parts = {match[2]: match[1] for line in details if (match := _LINE.match(line))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        before = (folder / f"{key}.json").exists()
        stored = [each for file in files[:MOST] if (each := _read(file))]
        for file in files[MOST - 1 :]:
            file.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as new:
            try:
                json.dump(parts, new)
                new.flush()
                os.replace(new.name, folder / f"{key}.json")
            except OSError:  # the disk may be full
                os.unlink(new.name)
                raise
    except OSError:
        return ""
    _bound_sometimes()
    # One key may have several files: for varying sizes, each file has its own conditions on the sizes.
    return _BEFORE if before else _reason(parts, stored)


def _bound_sometimes() -> None:
    global _last_bound
    if config.cache_bytes is not None and time.monotonic() - _last_bound >= _INTERVAL:
        bound(cache_folder(), config.cache_bytes)
        _last_bound = time.monotonic()


def bound(folder: Path, most: int) -> None:
    """Remove the least recently used files of Inductor's cache until all together have at most ``most`` bytes.

    Graphs and kernels that are not found are compiled again. Only files with Inductor's and Triton's names are removed
    or counted, in case ``folder`` contains other files, too; precompiled headers stay. Of Triton, the folder of a
    kernel is removed as a whole. What was used last is known from the files' access times, which Linux updates about
    once a day. Files that were written in the last hour stay.
    """
    units: dict[Path, tuple[float, int]] = {}
    for pattern, name in _REMOVABLE.items():
        for file in folder.glob(pattern):
            with contextlib.suppress(OSError):
                state = file.lstat()
                if stat.S_ISREG(state.st_mode) and name.fullmatch(file.relative_to(folder).as_posix()):
                    unit = file.parent if pattern.startswith("triton") else file
                    used, size = units.get(unit, (0.0, 0))
                    units[unit] = max(used, state.st_atime, state.st_mtime), size + state.st_size
    excess = sum(size for _, size in units.values()) - most
    for unit, (used, size) in sorted(units.items(), key=lambda each: each[1]):
        if excess <= 0 or used > time.time() - _IN_USE:
            return
        with contextlib.suppress(OSError):
            shutil.rmtree(unit) if unit.is_dir() else unit.unlink()
            excess -= size


def _read(file: Path) -> dict[str, str] | None:
    """Read the parts of a stored key. Return None for a file that this module did not write."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = file.read_bytes()[: _LARGEST + 1]
        parts = json.loads(text) if len(text) <= _LARGEST else None
        if isinstance(parts, dict) and all(isinstance(each, str) for each in parts.values()):
            return parts
    return None


def _reason(parts: Mapping[str, str], stored: Sequence[Mapping[str, str]]) -> str:
    if not stored:
        return "there is no record of earlier graphs in this cache"
    same = [each for each in stored if each.get("gm") == parts.get("gm")]
    if not same:
        return "no recorded graph has the same ops and constants"
    differing = [[name for name in {**each, **parts} if each.get(name) != parts.get(name)] for each in same]
    nearest = min(differing, key=len)
    names = list(dict.fromkeys(map(_words, nearest)))
    words = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more parts of the key" if names[_NAMED:] else "")
    return f"the nearest recorded graph differs in {words}"


def _words(part: str) -> str:
    for pattern, words in _PATTERNS:
        if re.fullmatch(pattern, part):
            return re.sub(pattern, words, part)
    return _WORDS.get(part.partition("[")[0], f"`{part}`")
