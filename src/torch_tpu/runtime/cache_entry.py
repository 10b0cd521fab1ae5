"""One executable as a file: a checksummed header that says where it was made, then XLA's bytes. Nothing is unpickled.

    torch_tpu executable 2\n
    <bytes of the header> <SHA-256 of the header, hex>\n
    <header: JSON>
    <payload>

The header is read and compared before any byte of the payload is looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_MAGIC = b"torch_tpu executable 2\n"
_HEADER_LIMIT = 1 << 16


class Unusable(Exception):
    """An entry that must not be used; the text says why and continues "the entry ..."."""


@dataclass(frozen=True)
class Header:
    """What an entry says about itself.

    Attributes:
        key: the key it was kept under.
        name: of the operator or graph.
        environment: versions, chip and CPU it was made on and for.
        created: seconds since the epoch.
        size, sha256: of the payload.
    """

    key: str
    name: str
    environment: dict[str, str]
    created: float
    size: int
    sha256: str


def pack(header: Header) -> bytes:
    """What stands before the payload."""
    text = json.dumps(asdict(header)).encode()
    return _MAGIC + f"{len(text)} {hashlib.sha256(text).hexdigest()}\n".encode() + text


def header_for(key: str, name: str, environment: Mapping[str, str], created: float, payload: bytes) -> Header:
    return Header(key, name[:200], dict(environment), created, len(payload), hashlib.sha256(payload).hexdigest())


def unpack(content: bytes) -> tuple[Header, int]:
    """The header, and where the payload starts. `content` may end after the header.

    Raises:
        Unusable: this is no entry, or a damaged one.
    """
    if not content:
        raise Unusable("is empty")
    if not content.startswith(_MAGIC):
        raise Unusable("is no executable that this version of torch_tpu wrote")
    start = content.find(b"\n", len(_MAGIC), len(_MAGIC) + 100) + 1
    length, _, digest = content[len(_MAGIC):max(start - 1, 0)].partition(b" ")
    if not start or not length.isdigit() or int(length) > _HEADER_LIMIT:
        raise Unusable("is damaged (its first lines)")
    end = start + int(length)
    if len(content) < end:
        raise Unusable("is cut off in its header")
    text = content[start:end]
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise Unusable("is damaged (its header does not match its checksum)")
    try:
        header = Header(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unusable("is damaged (its header has other fields)") from error
    return header, end


def payload(content: bytes, key: str, environment: Mapping[str, str]) -> bytes:
    """XLA's bytes, after everything that is known about the entry was compared.

    Raises:
        Unusable: the entry is damaged, another program's, or was made for another machine or by other versions.
    """
    header, start = unpack(content)
    if header.key != key:
        raise Unusable("is another program's (its name was changed)")
    if header.environment != environment:
        raise Unusable(f"was made elsewhere ({_difference(header.environment, environment)})")
    if len(content) - start != header.size:
        raise Unusable(f"is cut off or too long ({len(content) - start:,} bytes of {header.size:,})")
    bytes_ = content[start:]
    if hashlib.sha256(bytes_).hexdigest() != header.sha256:
        raise Unusable("is damaged (its content does not match its checksum)")
    return bytes_


def _difference(theirs: object, ours: Mapping[str, str]) -> str:
    if not isinstance(theirs, dict):
        return "its header has other fields"
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{name} {theirs.get(name, '-')}, here {ours.get(name, '-')}" for name in names)


def read(path: Path) -> tuple[bytes, int]:
    """The bytes of a file of ours and its inode; marks it as used now.

    Raises:
        FileNotFoundError: there is none.
        Unusable: something else stands in its place, or somebody else could have written it.
        OSError: it cannot be read.
    """
    try:
        # Not through links, and without waiting where somebody put a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise Unusable("is a symbolic link") from error
        if path.exists() and not path.is_file():
            raise Unusable("is no file") from error  # a socket
        if isinstance(error, PermissionError):
            raise Unusable("cannot be read (permission denied)") from error
        raise
    try:
        info = os.fstat(descriptor)
        if stat.S_ISDIR(info.st_mode):
            raise Unusable("is a folder")
        if not stat.S_ISREG(info.st_mode):
            raise Unusable("is no file")
        why = distrust(info)
        if why is not None:
            raise Unusable(why)
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            content = file.readall()
        try:
            os.utime(descriptor)
        except OSError:  # a read-only cache still serves; its order of use does not change
            pass
        return content, info.st_ino
    finally:
        os.close(descriptor)


def read_header(path: Path) -> Header:
    """The header alone, for lists. Raises what `read` and `unpack` raise."""
    if path.is_symlink() or not path.is_file():
        raise Unusable("is no file")
    with path.open("rb") as file:
        return unpack(file.read(_HEADER_LIMIT + 200))[0]


def distrust(info: os.stat_result) -> str | None:
    """Why a file or folder must not be trusted: somebody else could have written it. None: it is the user's own."""
    if info.st_uid != os.geteuid():
        return f"belongs to {_user(info.st_uid)}, and this process runs as {_user(os.geteuid())}"
    if info.st_mode & 0o022:
        return f"may be written by other users (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every entry of a cache folder; nothing that is not named like one, whatever else lies there."""
    yield from _scan(folder, lambda name: len(name) == 62 and _hex(name))


def leftovers(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Temporary files and lock files, in use or not."""
    yield from _scan(folder, lambda name: name.startswith(".") and name.endswith((".new", ".lock"))
                     and _hex(name[1:63]))


def _hex(text: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in text)


def _scan(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        shards = [entry.path for entry in os.scandir(folder)
                  if len(entry.name) == 2 and _hex(entry.name) and entry.is_dir(follow_symlinks=False)]
    except OSError:  # no folder yet, or one that may not be listed
        return
    for shard in shards:
        try:
            for entry in os.scandir(shard):
                if wanted(entry.name):
                    try:
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # another process removed it
                        continue
        except OSError:  # another process removed it
            continue
