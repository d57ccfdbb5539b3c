"""`python -m erllama.tools.kvc`: look into, check and trim cache folders.

    kvc inspect PATH…   what is in files or folders; --tree for shared prefixes
    kvc verify PATH…    every checksum and every link to a parent; exit code 1 if anything is wrong
    kvc stats PATH      sharing, sizes, reasons, hits
    kvc explain PATH PROMPT   what of a prompt would be reused, per model, and where and why it stops
    kvc gc PATH         remove what crashes left behind
    kvc prune PATH      remove by size, age or model, leaves first
    kvc sim LOG         replay a look-up log under other budgets

All take --json. The first four only read; they may run beside a live store. gc and prune take the folder's
removing lock, so a live store notices and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from erllama.kvcache.columns import PartColumns
from erllama.kvcache.filetier import FileTier
from erllama.kvcache.journal import read_journals
from erllama.kvcache.key import as_tokens
from erllama.kvcache.lookuplog import read_log
from erllama.kvcache.root import TierBusy
from erllama.kvcache.sim import Simulation
from erllama.kvcache.tiers import DiskTier
from erllama.sizes import parse_bytes

from . import show
from .asked import AskedText, AskedTokens
from .explain import explain as explain_prompt
from .folder import build_nodes, count_by, expand, nodes_folder, read_file
from .preview import show_text
from .prune import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.kvcache.kinds import PartKind

    from .asked import Asked
    from .explain import Explanation
    from .folder import StoredFile

DAY_S = 86_400.0


class Misuse(Exception):
    """Arguments that argparse takes and the command does not."""


def describe(file: StoredFile) -> dict[str, Any]:
    """One file as plain data."""
    row: dict[str, Any] = {
        "path": file.path,
        "bytes": file.n_bytes,
        "used": file.mtime,
        "damage": file.damage,
    }
    if file.header is None or file.meta is None:
        return row
    header, meta = file.header, file.meta
    return row | {
        "name": meta.name.hex(),
        "parent": meta.parent.hex(),
        "shape": meta.identity.shape_hash.hex(),
        "kind": header.kind.name.lower(),
        "reason": header.reason.name.lower(),
        "provenance": header.provenance.name.lower(),
        "start": meta.start,
        "n_tokens": header.n_tokens,
        "n_ctx": header.n_ctx,
        "quant_bits": header.quant_bits,
        "payload_bytes": header.payload_bytes,
        "created_s": header.created_ns / 1e9,
        "expires_s": None if meta.expires_ns is None else meta.expires_ns / 1e9,
        "text": show_text(meta.text),
        "tokens": [int(token) for token in meta.tokens],
        "facts": dict(meta.facts),
    }


def inspect(args: argparse.Namespace) -> int:
    """Heads of files."""
    files = [read_file(path) for path in expand(args.paths)]
    if args.json:
        print(json.dumps([describe(file) for file in files], default=repr))
    elif args.tree:
        show.tree(build_nodes(files))
    elif len(files) == 1:
        show.one(describe(files[0]))
    else:
        show.table(files)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Checksums, sizes, names, parents."""
    files = [read_file(path, whole=True) for path in expand(args.paths)]
    wrong = [{"path": file.path, "what": file.damage} for file in files if file.damage]
    if len(files) > 1:
        orphans = [node for node in build_nodes(files).values() if node.is_orphan]
        wrong += [
            {"path": file.path, "what": "orphan: a parent is missing"}
            for node in orphans
            for file in node.files.values()
        ]
    if args.json:
        print(json.dumps({"files": len(files), "wrong": wrong}))
    else:
        show.verdict(len(files), wrong)
    return 1 if wrong else 0


def stats(args: argparse.Namespace) -> int:
    """Totals of a folder."""
    files = [read_file(path) for path in expand([args.path])]
    nodes = build_nodes(files)
    shared = [node for node in nodes.values() if len(node.children) > 1]
    hits = read_journals(_tier(args.path).root, everybody=True)
    totals = {
        "files": len(files),
        "bytes": sum(file.n_bytes for file in files),
        "nodes": len(nodes),
        "tokens": sum(len(node.meta.tokens) for node in nodes.values()),
        "models": len({node.meta.identity.shape_hash for node in nodes.values()}),
        "conversations": sum(1 for node in nodes.values() if not node.children),
        "bytes_if_nothing_were_shared": unshared_bytes(nodes.values()),
        "branching_nodes": len(shared),
        "damaged": sum(1 for file in files if file.damage),
        "orphans": sum(1 for node in nodes.values() if node.is_orphan),
        "hits": round(sum(n for n, _ in hits.values()), 1),
        "bytes_by_kind": dict(count_by(files, "kind")),
        "bytes_by_reason": dict(count_by(files, "reason")),
    }
    if args.json:
        print(json.dumps(totals))
    else:
        show.totals(totals)
    return 0


def unshared_bytes(nodes: Any) -> int:
    """What the same conversations would take if each kept its own copy of its path."""
    nodes = sorted(nodes, key=lambda node: node.meta.start)
    above: dict[bytes, int] = {}
    total = 0
    for node in nodes:
        above[node.meta.name] = above.get(node.meta.parent, 0) + node.n_bytes
        if not node.children:
            total += above[node.meta.name]
    return total


def explain(args: argparse.Namespace) -> int:
    """What of a prompt would be reused; 1 if nothing."""
    asked = _asked(args)
    nodes = build_nodes(read_file(path) for path in expand([args.path]))
    found = explain_prompt(nodes, asked, now=time.time(), window=args.window)
    if args.json:
        print(json.dumps({"unit": asked.unit, "asked": len(asked), "models": [_explained(e) for e in found]}))
    else:
        show.explained(found, asked)
    return 0 if any(e.n_usable or e.is_inside for e in found) else 1


def _asked(args: argparse.Namespace) -> Asked:
    given = [value for value in (args.prompt, args.file, args.tokens) if value is not None]
    if len(given) != 1:
        raise Misuse("give a PROMPT, or --file, or --tokens")
    if args.tokens is not None:
        try:
            return AskedTokens(as_tokens([int(token) for token in args.tokens.replace(",", " ").split()]))
        except (ValueError, OverflowError):
            raise Misuse("--tokens: expected token ids, as 1,2,3") from None
    if args.file is None:
        return AskedText(os.fsencode(args.prompt))
    with open(args.file, "rb") as file:
        return AskedText(file.read().removesuffix(b"\n"))


def _explained(e: Explanation) -> dict[str, Any]:
    """One model's part as plain data."""
    path = [*e.path, *((e.partial,) if e.partial is not None else ())]
    return {
        "shape": e.identity.shape_hash.hex(),
        "salted": bool(e.identity.salt),
        "n_ctx": e.identity.n_ctx,
        "quant_bits": e.identity.quant_bits,
        "facts": dict(e.facts),
        "nodes": e.n_nodes,
        "matched": e.n_matched,
        "matched_tokens": e.n_tokens,
        "usable_tokens": e.n_usable,
        "usable_inside_next": e.is_inside,
        "path": [
            {
                "name": node.meta.name.hex(),
                "start": node.meta.start,
                "n_tokens": len(node.meta.tokens),
                "shared_tokens": e.n_shared if node is e.partial else len(node.meta.tokens),
                "parts": {kind.name.lower(): file.n_bytes for kind, file in sorted(node.files.items())},
                "text": show_text(node.meta.text),
            }
            for node in path
        ],
        "stop": asdict(e.stop),
        "marks": e.marks,
    }


def _tier(path: str) -> FileTier:
    return FileTier(DiskTier("kvc", path, 1 << 62))


def gc(args: argparse.Namespace) -> int:
    """Remove temporaries of dead processes, orphans and damaged heads."""
    tier = _open(args.path)
    found, _, removed = tier.start(PartColumns(), time.time())
    tier.close()
    result = {"removed": removed, "quarantined": sum(found.rejected.values()), "nodes": len(found.found)}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{removed} leftovers removed ({result['quarantined']} of them kept in quarantine)")
    return 0


def prune(args: argparse.Namespace) -> int:
    """Remove nodes until the conditions hold."""
    tier = _open(args.path)
    nodes = build_nodes(read_file(path) for path in expand([args.path]))
    chosen = choose(
        nodes,
        max_bytes=args.max_bytes,
        unused_since=None if args.older_than is None else time.time() - args.older_than * DAY_S,
        shape_prefix=args.shape,
    )
    freed = sum(node.n_bytes for node in chosen)
    if not args.dry_run:
        tier.root.open()
        with tier.root.removing():
            freed = tier.remove((node.meta.name, kind) for node in chosen for kind in _base_last(node.files))
        tier.close()
    result = {"nodes": len(chosen), "bytes": freed, "dry_run": args.dry_run}
    print(json.dumps(result) if args.json else show.pruned(result))
    return 0


def _base_last(kinds: Any) -> list[PartKind]:
    return sorted(kinds, reverse=True)


def sim(args: argparse.Namespace) -> int:
    """Hit rates under budgets."""
    results = []
    for budget in args.max_bytes:
        result = Simulation(budget).replay(read_log(args.log))
        results.append(
            {
                "max_bytes": budget,
                "hit_rate": result.hit_rate,
                "finds": result.n_finds,
                "tokens_asked": result.tokens_asked,
                "tokens_matched": result.tokens_matched,
                "bytes_written": result.bytes_written,
                "evictions": result.evictions,
                "refused": result.refused,
            }
        )
    if args.json:
        print(json.dumps(results))
    else:
        show.simulated(results)
    return 0


def _open(path: str) -> FileTier:
    """A tier on an existing folder. Raises: FileNotFoundError, so that a typing error creates nothing."""
    folder = nodes_folder(path)
    if folder == path:
        raise FileNotFoundError(f"{path}: not a cache folder (it has no nodes/ in it)")
    return _tier(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m erllama.tools.kvc", description="Look into KV cache folders."
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(run.__name__, help=help_text, description=help_text)
        sub.add_argument("--json", action="store_true", help="print JSON for scripts")
        sub.set_defaults(run=run)
        return sub

    sub = command(inspect, "show headers, metadata, tokens and text of files or folders")
    sub.add_argument("paths", nargs="+", metavar="PATH")
    sub.add_argument("--tree", action="store_true", help="show shared prefixes as a tree")
    sub = command(verify, "check every checksum, size, name and parent")
    sub.add_argument("paths", nargs="+", metavar="PATH")
    sub = command(stats, "show sharing, sizes, reasons and hits of a folder")
    sub.add_argument("path", metavar="PATH")
    sub = command(explain, "what of a prompt would be reused, and where and why it stops")
    sub.epilog = (
        "Works without a model: text is compared with the text of what is stored. Control tokens are stored "
        "by id only; where one is, anything like <|im_start|> or [INST] counts as equal. With --tokens the "
        "comparison is the engine's own. Exit code: 0 something would be reused, 1 nothing would, 2 it "
        "cannot be told."
    )
    sub.add_argument("path", metavar="PATH")
    sub.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt's text")
    sub.add_argument("--file", metavar="FILE", help="read it from there; one trailing newline is dropped")
    sub.add_argument("--tokens", metavar="IDS", help="token ids instead of text, as 1,2,3")
    sub.add_argument(
        "--window", type=int, metavar="N", help="width of the model's sliding window, if it has one"
    )
    sub = command(gc, "remove what crashes left behind")
    sub.add_argument("path", metavar="PATH")
    sub = command(prune, "remove nodes by size, age or model, leaves first")
    sub.add_argument("path", metavar="PATH")
    sub.add_argument("--max-bytes", type=parse_bytes, help="keep at most this much, least recently used goes")
    sub.add_argument("--older-than", type=float, metavar="DAYS", help="remove what was not used for so long")
    sub.add_argument("--shape", help="remove everything of one model shape (a prefix of its hash)")
    sub.add_argument("--dry-run", action="store_true", help="only say what would go")
    sub = command(sim, "replay a look-up log under other budgets")
    sub.add_argument("log", metavar="LOG")
    sub.add_argument(
        "--max-bytes", type=parse_bytes, nargs="+", required=True, help="budgets, as 500M or 20G"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 fine, 1 something is wrong (explain: nothing would be
    reused), 2 cannot be done.
    """
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, Misuse) as no:
        print(f"kvc: {no}", file=sys.stderr)
    except TierBusy:
        print("kvc: another process is removing files there; try again", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
