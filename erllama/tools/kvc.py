"""`python -m erllama.tools.kvc`: look into, check and trim cache folders.

    kvc inspect PATH…   what is in files or folders; --tree for shared prefixes;
                        exit code 1 if a file is damaged
    kvc verify PATH…    every checksum and every link to a parent; exit code 1 if anything is wrong;
                        --fix removes what is
    kvc stats PATH      sharing, sizes, reasons, hits
    kvc explain PATH PROMPT   what of a prompt would be reused, per model, and where and why it stops
    kvc gc PATH         remove what crashes left behind
    kvc prune PATH      remove by size, age or model, leaves first
    kvc sim LOG         replay a look-up log under other budgets

All take --json. The first four only read (verify without --fix); they may run beside a live store. gc and
prune take the folder's removing lock, so a live store notices and goes on. verify --fix wants the folder for
itself.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

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
from .verify import find_wrong, is_in_use, remove_wrong

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from erllama.kvcache.kinds import PartKind

    from .asked import Asked
    from .explain import Explanation
    from .folder import StoredFile, StoredNode
    from .verify import Wrong

DAY_S = 86_400.0
COLD = ', exact="cold"'


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
    return 1 if any(file.damage for file in files) else 0


def verify(args: argparse.Namespace) -> int:
    """Checksums, sizes, names, parents; with --fix what is wrong is removed."""
    paths: list[str] = []
    wrong: list[Wrong] = []
    n_removed = 0
    for path in args.paths:
        found = expand([path])
        paths += found
        if args.fix:
            bad, n = _fix(path)
            wrong, n_removed = wrong + bad, n_removed + n
    if not args.fix:
        is_one_file = len(paths) == 1 and paths == args.paths
        wrong = find_wrong([read_file(path, whole=True) for path in paths], parents=not is_one_file)
    if args.json:
        rows = [{"path": item.path, "what": item.what} for item in wrong]
        print(json.dumps({"files": len(paths), "wrong": rows} | ({"removed": n_removed} if args.fix else {})))
    else:
        show.verdict(len(paths), wrong, n_removed if args.fix else None)
    return 1 if any(os.path.exists(item.path) for item in wrong) else 0


def _fix(path: str) -> tuple[list[Wrong], int]:
    """What was wrong in one folder, and how many files went."""
    tier = _open(path)
    tier.root.open()
    try:
        if tier.root.read_only:
            raise PermissionError(f"{path}: cannot be written")
        with tier.root.removing():
            if is_in_use(tier.root):
                raise Misuse(f"{path}: a running process uses this folder; end it first")
            wrong = find_wrong([read_file(file, whole=True) for file in expand([path])])
            return wrong, remove_wrong(tier.root, wrong) if wrong else 0
    finally:
        tier.close()


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
        "models": count_models(nodes.values()),
        "conversations": sum(1 for node in nodes.values() if not node.children),
        "bytes_if_nothing_were_shared": unshared_bytes(nodes.values()),
        "branching_nodes": len(shared),
        "damaged": sum(1 for file in files if file.damage),
        "orphans": sum(1 for node in nodes.values() if node.is_orphan),
        "hits": round(sum(n for n, _ in hits.values()), 1),
        "bytes_by_model": bytes_by_model(nodes.values()),
        "bytes_by_kind": dict(count_by(files, "kind")),
        "bytes_by_reason": dict(count_by(files, "reason")),
    }
    if args.json:
        print(json.dumps(totals))
    else:
        show.totals(totals)
    return 0


def count_models(nodes: Collection[StoredNode]) -> int:
    """Shapes; those of `exact="cold"` only where the model has no other."""
    plain = {(_model(node), node.meta.identity.shape_hash) for node in nodes if not _is_cold(node)}
    cold = {_model(node) for node in nodes if _is_cold(node)}
    return len(plain) + len(cold - {name for name, _ in plain})


def bytes_by_model(nodes: Collection[StoredNode]) -> dict[str, int]:
    """Bytes by model file, one that is stored in several shapes by its shapes.

    What `exact="cold"` requests stored is a line of its own, of the same model: it has trees of its own.
    """
    shapes: dict[str, set[bytes]] = defaultdict(set)
    for node in nodes:
        if not _is_cold(node):
            shapes[_model(node)].add(node.meta.identity.shape_hash)
    counts: Counter[str] = Counter()
    for node in nodes:
        name = _model(node)
        if _is_cold(node):
            name += COLD
        elif len(shapes[name]) > 1:
            name += f" {node.meta.identity.shape_hash.hex()[:12]}"
        counts[name] += node.n_bytes
    return dict(counts)


def _is_cold(node: StoredNode) -> bool:
    return node.meta.facts.get("exact") == "cold"


def _model(node: StoredNode) -> str:
    return str(node.meta.facts.get("model") or node.meta.identity.shape_hash.hex()[:12])


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
    if args.max_bytes is None and args.older_than is None and args.shape is None:
        raise Misuse("prune: give a limit: --max-bytes, --older-than or --shape")
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
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such folder")
    if nodes_folder(path) == path:
        raise FileNotFoundError(f"{path}: not a cache folder (it has no nodes/ in it)")
    return _tier(path)


def size(text: str) -> int:
    """A number of bytes, for argparse."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 500M or 20G") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m erllama.tools.kvc", description="Look into KV cache folders."
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(run.__name__, help=help_text, description=help_text)
        sub.add_argument("--json", action="store_true", help="print JSON for scripts")
        sub.set_defaults(run=run, parser=sub)
        return sub

    sub = command(inspect, "show headers, metadata, tokens and text of files or folders")
    sub.add_argument("paths", nargs="+", metavar="PATH")
    sub.add_argument("--tree", action="store_true", help="show shared prefixes as a tree")
    sub = command(verify, "check every checksum, size, name and parent")
    sub.add_argument("paths", nargs="+", metavar="PATH")
    sub.add_argument(
        "--fix",
        action="store_true",
        help="remove what is wrong and what hangs behind it; only while no process uses the folder",
    )
    sub = command(stats, "show sharing, sizes, reasons and hits (of blocks) of a folder")
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
    sub.add_argument("--max-bytes", type=size, help="keep at most this much, least recently used goes")
    sub.add_argument("--older-than", type=float, metavar="DAYS", help="remove what was not used for so long")
    sub.add_argument("--shape", help="remove everything of one model shape (a prefix of its hash)")
    sub.add_argument("--dry-run", action="store_true", help="only say what would go")
    sub = command(sim, "replay a look-up log under other budgets")
    sub.add_argument("log", metavar="LOG")
    sub.add_argument("--max-bytes", type=size, nargs="+", required=True, help="budgets, as 500M or 20G")
    return made


def _refuse(sub: argparse.ArgumentParser, unknown: str) -> NoReturn:
    """Exit with the usage and the option that comes nearest."""
    known = [name for action in sub._actions for name in action.option_strings]
    near = difflib.get_close_matches(unknown.split("=")[0], known, n=1) if unknown.startswith("-") else []
    sub.error(f"unknown argument {unknown}; " + (f"did you mean {near[0]}?" if near else "see --help"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 fine, 1 something is wrong (explain: nothing would be
    reused), 2 cannot be done.
    """
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        _refuse(args.parser, unknown[0])
    try:
        return int(args.run(args))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as no:
        print(f"kvc: {no.filename}: {no.strerror}" if no.filename else f"kvc: {no}", file=sys.stderr)
    except Misuse as no:
        print(f"kvc: {no}", file=sys.stderr)
    except TierBusy:
        print("kvc: another process is removing files there; try again", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
