"""Implements `kvloft clear` and `kvloft evict`, which remove chunks from a server.

Other commands also use this module's tenant arguments and texts. It must not import the extension
or slow modules at the top level, because `kvloft serve` imports it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvloft.cli import warn
from kvloft.cli.connection import add_socket, socket_of
from kvloft.config.units import size_text
from kvloft.errors import ConfigError
from kvloft.limits import read_salt

NONE: Final = "(none)"
"""The text that a server reports for a setting that is not set."""
CLEAR_DESCRIPTION: Final = """\
Remove all chunks in a namespace from memory and disk. Engines keep running
and save new chunks. A namespace can be cleared even if it has no engines.
Without --yes, the command asks for confirmation; if stdin is not a terminal,
nothing is cleared. Exit status: 0 success; 1 no server responds, or the user
did not confirm; 2 the server has more than one namespace and --namespace is
missing, the disk cannot be listed, or some chunks remain on disk.
"""
EVICT_DESCRIPTION: Final = """\
Permanently remove all of a tenant's chunks from memory and disk. A tenant is
the set of requests with the same cache_salt. The command covers all models and
LoRA adapters, including models without an engine. With --host-only, chunks are
evicted from host memory only; the salt is then optional, and omitting it evicts
every tenant's chunks.
"""
EVICT_EPILOG: Final = """\
  kvloft evict --socket PATH --salt-file secret.txt
  printf %s "$SALT" | kvloft evict --socket PATH --salt-file -
  kvloft evict --socket PATH --namespace 3f9a --host-only

Other users of this machine can read command lines, so pass secret salts with
--salt-file. The CLI hashes the salt locally and sends only the hash.

Stop the tenant's requests first, because running requests save new chunks. A
chunk with a load in progress is removed from the index immediately, and its
memory is freed when the load completes; with --host-only, it is kept. The bytes
remain in memory and on disk until overwritten, but no index entry refers to
them. KV in GPU memory is not affected.

Exit status: 0 success, even if no chunks have this salt; 1 no server responds,
or some chunks remain, for example on a failing disk; 2 invalid argument.
"""


def add_parser(subparsers: Any) -> None:
    """Add both commands to the argparse subparsers."""
    parser = subparsers.add_parser(
        "clear", help="remove all chunks in a namespace", description=CLEAR_DESCRIPTION
    )
    add_socket(parser)
    _add_namespace(
        parser,
        "the namespace to clear, as printed by `kvloft status`; "
        "required if the server has more than one",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.set_defaults(run=clear)
    parser = subparsers.add_parser(
        "evict",
        help="remove all of a tenant's chunks",
        description=EVICT_DESCRIPTION,
        epilog=EVICT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_socket(parser)
    _add_namespace(parser, "evict only from this namespace, as printed by `kvloft status`")
    add_salt(parser)
    parser.add_argument(
        "--host-only",
        action="store_true",
        help="evict only from host memory; keep chunks on disk",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (sizes in bytes)")
    parser.set_defaults(run=evict)


def clear(args: argparse.Namespace) -> int:
    """Clear a namespace. Return 0, or 1 if the user does not confirm.

    Raises StoreError if no server responds, and ConfigError if --namespace is missing.
    """
    from kvloft._core import server_clear, server_status

    socket = socket_of(args)
    if not args.yes:
        server_status(socket)  # do not ask for confirmation if no server responds
        what = f"namespace {args.namespace}" if args.namespace else "all chunks"
        if not _confirm(f"Remove {what} from the server at {socket}?"):
            warn("not confirmed, so nothing was removed; use --yes to skip the prompt")
            return 1
    num_chunks = server_clear(socket, namespace=args.namespace.lower())
    print(f"{counted(num_chunks, 'chunk')} removed")
    return 0


def evict(args: argparse.Namespace) -> int:
    """Evict chunks and print the result. Return 0, or 1 if any chunks remain.

    Raises StoreError if no server responds, and ConfigError for an invalid argument.
    """
    from kvloft._core import server_evict

    socket, salt = socket_of(args), read_salt_argument(args)
    if salt is None and not args.host_only:
        raise ConfigError(
            "select a tenant with --salt-file or --salt, or use --host-only; to remove all chunks "
            "in a namespace, use `kvloft clear`."
        )
    report = server_evict(
        socket, namespace=args.namespace.lower(), salt=salt, host_only=args.host_only
    )
    has_nothing = (
        salt is not None and report["complete"] and not report["chunks"] and not report["in_use"]
    )
    if args.json:
        print(json.dumps(report))
    elif has_nothing:
        print(f"no chunks{' in host memory' if args.host_only else ''} have this salt")
    else:
        print(_evicted(report, args.host_only))
    if report["complete"]:
        return 0
    warn(
        "some chunks remain because the disk is not responding or a namespace is still opening; "
        "run the command again"
    )
    return 1


def _add_namespace(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--namespace", metavar="ID", default="", type=_utf8, help=text)


def add_salt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a tenant."""
    salt = parser.add_mutually_exclusive_group()
    salt.add_argument("--salt", type=_utf8, help="the cache_salt of the tenant's requests")
    salt.add_argument(
        "--salt-file",
        metavar="FILE",
        help="file containing the salt, or - for stdin; one trailing newline is ignored",
    )


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8") from None
    return text


def read_salt_argument(args: argparse.Namespace) -> str | None:
    """Return the salt from --salt or --salt-file. Raises ConfigError."""
    if args.salt_file is None:
        salt: str | None = args.salt
    else:
        try:
            is_stdin = args.salt_file == "-"
            raw = sys.stdin.buffer.read() if is_stdin else Path(args.salt_file).read_bytes()
        except OSError as e:
            raise ConfigError(
                f"--salt-file {args.salt_file} cannot be read ({e.strerror})."
            ) from None
        salt = read_salt(raw, f"--salt-file {args.salt_file}")
    if salt == "":
        raise ConfigError("the salt is empty; no request has an empty cache_salt.")
    return salt


def salt_tag(salt: str) -> str:
    """Return the tag that identifies a salt in a server's output.

    The tag is 16 hex digits long and the same in all namespaces.
    """
    from kvloft._core import root_key

    return root_key(bytes(32), None, salt)[-8:].hex()


def _confirm(question: str) -> bool:
    """Ask the user to confirm. Return False at the end of input or if stdin is not a terminal."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # the user pressed Ctrl-D
        print()
        return False


def _evicted(report: dict[str, Any], host_only: bool) -> str:
    freed = f"{size_text(report['host_bytes'])} of host memory"
    freed += "" if host_only else f" and {size_text(report['disk_bytes'])} on disk"
    chunks, namespaces = (counted(report[f"{noun}s"], noun) for noun in ("chunk", "namespace"))
    text = f"{chunks} evicted from {namespaces}: {freed}"
    if report["in_use"]:
        fate = "not evicted" if host_only else "to be freed when released"
        text += f"; {report['in_use']:,} in use, {fate}"
    return text


def counted(number: int, noun: str) -> str:
    """Return ``number`` and ``noun`` as text, with the noun in the plural unless number is 1."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def limits_text(settings: Mapping[str, str]) -> str:
    """Return a server's quotas, TTLs, shares and NUMA nodes as text, or "" if none are set."""
    return "; ".join(_limits({name: text for name, text in settings.items() if text != NONE}))


def _limits(given: Mapping[str, str]) -> Iterator[str]:
    of_host = (
        "of its namespace's host memory" if "%" in given.get("salt_quota", "") else "of host memory"
    )
    words = {
        "salt_quota": f"at most {{}} {of_host}",
        "salt_disk_quota": "at most {} of the disk",
        "salt_ttl": "expires after {}",
    }
    bounds = [text.format(given[name]) for name, text in words.items() if name in given]
    if bounds:
        yield f"each salt: {', '.join(bounds)}"
    if "salt_limits" in given:
        noun = "other limits" if bounds else "limits"
        yield f"{noun} for individual salts: {given['salt_limits']}"
    if "share" in given:
        yield f"fixed shares of host memory: {given['share']}"
    if "numa" in given:
        yield f"host memory on NUMA node{'s' if ',' in given['numa'] else ''} {given['numa']}"
