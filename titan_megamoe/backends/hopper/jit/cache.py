"""Cubins as files: each made once, by one process at a time, and checked before it is used.

Folder: TITAN_MEGAMOE_CACHE, else XDG_CACHE_HOME/titan_megamoe, else ~/.cache/titan_megamoe. Where that cannot
be written, a folder of this user under the system's temporary directory takes its place, with one log line;
what the first folder already has is used all the same.

File: MAGIC, the SHA-256 of what follows, the cubin. Its name holds a hash of source, macros and architecture,
so a changed kernel never meets an old cubin. A file that fails the check is made again.

Many processes at once: a file lock lets one of them compile while the others wait; a lock dies with its
process. The result appears by an atomic rename, so where a file system has no locks several may compile, and
each still reads a whole file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ....errors import MegaMoEError
from .compiler import ARCH, compile_cubin

try:
    import fcntl
except ImportError:  # no file locks: the atomic rename alone keeps files whole
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("titan_megamoe")

MAGIC = b"titan_megamoe cubin 1\n"
_said: set[str] = set()


def cache_dirs() -> list[Path]:
    """Folders in order of preference; the last one is private to this user."""
    explicit = os.environ.get("TITAN_MEGAMOE_CACHE")
    if explicit:
        first = Path(explicit)
    else:
        root = os.environ.get("XDG_CACHE_HOME")
        first = (Path(root) if root else Path(os.path.expanduser("~/.cache"))) / "titan_megamoe"
    return [first, Path(tempfile.gettempdir()) / f"titan_megamoe-{os.getuid()}"]


def pack(cubin: bytes) -> bytes:
    """The content of a cache file."""
    return MAGIC + hashlib.sha256(cubin).digest() + cubin


def unpack(content: bytes) -> bytes | None:
    """The cubin in a cache file, or None if the file is empty, cut off or altered."""
    start = len(MAGIC) + 32
    cubin = content[start:]
    if not cubin or content[: len(MAGIC)] != MAGIC:
        return None
    return cubin if hashlib.sha256(cubin).digest() == content[len(MAGIC) : start] else None


def cached_cubin(
    source: str,
    name: str,
    defines: Sequence[str] = (),
    build: Callable[[str, str, Sequence[str]], bytes] = compile_cubin,
) -> bytes:
    """The cubin of `source`, from a cache file or made now and kept there.

    Args:
        source, name, defines: as `compile_cubin` takes them.
        build: the compiler.

    Raises:
        UnsupportedError, MegaMoEError: from the compiler, when a cubin has to be made.
        MegaMoEError: no folder can be written, though a cubin could be made.
    """
    file = _file(source, name, defines)
    folders = cache_dirs()
    for folder in folders:
        cubin = _read(folder / file)
        if cubin is not None:
            return cubin
    failures = []
    for folder in folders:
        reason = _unusable(folder)
        if reason is None:
            path = folder / file
            with _locked(path.with_suffix(".lock")):
                cubin = _read(path)  # another process may have made it meanwhile
                if cubin is None:
                    cubin = build(source, name, defines)
                    try:
                        _write(path, pack(cubin))
                    except OSError as error:  # a full disk costs the next process a compilation
                        _say_once(f"mega_moe: {path} cannot be kept ({error.strerror}).")
                return cubin
        failures.append(f"{folder}: {reason}")
        _say_once(f"mega_moe: kernel cache {folder} cannot be written ({reason}); trying another folder.")
    raise MegaMoEError(
        f"no folder for compiled kernels can be written ({'; '.join(failures)}). Fix: set "
        "TITAN_MEGAMOE_CACHE to a folder that can."
    )


def has_cubin(source: str, name: str, defines: Sequence[str] = ()) -> bool:
    """Whether `cached_cubin` would find the cubin and need no compiler."""
    return any(_read(folder / _file(source, name, defines)) is not None for folder in cache_dirs())


def _file(source: str, name: str, defines: Sequence[str]) -> str:
    facts = "\0".join((ARCH, *defines, source))
    return f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:24]}.cubin"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if path.parent == cache_dirs()[-1] and not _mine(path.parent):
        return None
    cubin = unpack(content)
    if cubin is None:
        _say_once(f"mega_moe: {path} is not a whole cubin ({len(content)} bytes); making it again.")
    return cubin


def _unusable(folder: Path) -> str | None:
    """Why files cannot be made in `folder`, which is created if need be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder == cache_dirs()[-1] and not _mine(folder):
            return "others can write to it"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def _mine(folder: Path) -> bool:
    """Only this user can have put files there: code of others is never loaded from a shared directory."""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield
            return
        yield  # closing the file releases the lock


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
