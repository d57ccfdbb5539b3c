"""How `kvc` shows things to a person: tables and trees on the terminal."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from erllama.sizes import show_bytes

from .folder import roots, subtree_bytes
from .preview import show_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .asked import Asked
    from .explain import Explanation
    from .folder import StoredFile, StoredNode
    from .verify import Wrong

_TREE_DEPTH = 400  # rich draws recursively; a longer chain is cut and says so
_WIDE = 160  # columns where there is no terminal: nothing but long text is cut
_MOMENTS = ("used", "created_s", "expires_s")  # seconds since 1970
_MIN_TEXT = 16  # columns that text gets at least; a narrower terminal wraps the line


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


def _print_listing(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], bytes | str]]) -> None:
    """Columns as wide as what is in them, and behind them text in the room that is left.

    `heads`: a ">" in front aligns to the right. Text is key bytes, which are cut in the middle, or a message.
    """
    made = Table(box=None, pad_edge=False)
    taken = 0
    for i, head in enumerate(heads):
        name = head.removeprefix(">")
        width = max([len(name), *(cell_len(cells[i]) for cells, _ in rows)])
        made.add_column(name, justify="right" if head != name else "left", no_wrap=True, min_width=width)
        taken += width + 2
    room = max(_MIN_TEXT, _console().width - taken)
    made.add_column("text", no_wrap=True, overflow="ellipsis", max_width=room)
    for cells, text in rows:
        shown = Text(show_text(text, room)) if isinstance(text, bytes) else Text(text, style="red")
        made.add_row(*map(Text, cells), shown)
    Console(width=taken + room).print(made)


def _ago(seconds: float) -> str:
    age = max(0.0, time.time() - seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age >= size:
            return f"{age / size:.0f} {unit} ago"
    return f"{age:.0f} s ago"


def one(facts: dict[str, Any]) -> None:
    """Everything about one file."""
    table = Table.grid(padding=(0, 2))
    print(f"{'path':<{max(map(len, facts))}}  {facts['path']}")  # never wrapped
    for key, value in facts.items():
        if key == "path":
            continue
        if key == "tokens":
            value = f"{' '.join(map(str, value[:24]))}{' …' if len(value) > 24 else ''}"
        elif key in _MOMENTS and value is not None:
            value = f"{value:.3f} ({datetime.fromtimestamp(value, UTC).isoformat(timespec='seconds')})"
        elif key.endswith("bytes") and isinstance(value, int):
            value = f"{value} ({show_bytes(value)})"
        table.add_row(Text(key, style="bold"), Text(str(value)))
    _console().print(table)


def table(files: Sequence[StoredFile]) -> None:
    """One line per file, and totals."""
    rows: list[tuple[Sequence[str], bytes | str]] = []
    for file in files:
        size, used = show_bytes(file.n_bytes), _ago(file.mtime)
        if file.header is None or file.meta is None:
            rows.append(((os.path.basename(file.path)[:12], "", "", size, "", used), str(file.damage)))
            continue
        meta, header = file.meta, file.header
        span = f"{meta.start}-{meta.start + len(meta.tokens)}"
        cells = (meta.name.hex()[:12], header.kind.name.lower(), span, size, header.reason.name.lower(), used)
        rows.append((cells, meta.text))
    _print_listing(("name", "part", ">tokens", ">size", "reason", "used"), rows)
    print(f"{len(files)} files, {show_bytes(sum(file.n_bytes for file in files))}")


def tree(nodes: dict[bytes, StoredNode]) -> None:
    """Shared prefixes; unbranched runs are one line."""
    console = _console()
    for top in roots(nodes):
        shown = Tree(_run_label(top))
        _grow(shown, top)
        console.print(shown)


def _run(node: StoredNode) -> list[StoredNode]:
    """A node and what follows without a branch."""
    run = [node]
    while len(run[-1].children) == 1:
        run.append(run[-1].children[0])
    return run


def _run_label(node: StoredNode) -> Text:
    run = _run(node)
    ends = [show_text(part.meta.text, 40) for part in ([run[0], run[-1]] if len(run) > 1 else run)]
    text = (" … " if len(run) > 2 else "").join(ends)
    end = run[-1].meta.start + len(run[-1].meta.tokens)
    parts = f"{node.meta.start}-{end}  {show_bytes(sum(n.n_bytes for n in run))}"
    label = Text(parts, style="red" if node.is_orphan else "bold", no_wrap=True, overflow="ellipsis")
    if node.is_orphan:
        label.append("  orphan", style="red")
    label.append(f"  {text}", style="dim")
    return label


def _grow(shown: Tree, top: StoredNode) -> None:
    todo = [(shown, _run(top)[-1], 0)]
    while todo:
        branch, node, depth = todo.pop()
        if depth > _TREE_DEPTH:
            branch.add(Text("…"))
            continue
        children = sorted(node.children, key=subtree_bytes, reverse=True)
        todo += [(branch.add(_run_label(child)), _run(child)[-1], depth + 1) for child in children]


def verdict(n_files: int, wrong: Sequence[Wrong], n_removed: int | None) -> None:
    """What `verify` found, and with --fix how many files went."""
    console = _console()
    for item in wrong:  # a path is one word, whatever the width
        console.print(Text(f"{item.path}: {item.what}", style="red"), soft_wrap=True)
    found = f"{len(wrong)} wrong" if wrong else "all clean"
    removed = "" if n_removed is None else f", {n_removed} removed (damaged ones are kept in quarantine/)"
    print(f"{n_files} files, {found}{removed if n_removed else ''}")


def explained(found: Sequence[Explanation], asked: Asked) -> None:
    """What of a prompt would be reused, a model after the other."""
    console = _console()
    if not found:
        console.print("nothing is stored here")
    telling = _telling(found)
    for e in found:
        console.print(Text(_heading(e, telling), style="bold"), soft_wrap=True)
        if e.path or e.partial is not None:
            _print_path(e)
        matched = f"{e.n_matched} of {len(asked)} {asked.unit}s match; {_usable(e)}"
        console.print(Text(matched), Text(f"{e.stop.why}: {e.stop.message}"), sep="\n")
        if e.stop.stored or e.stop.asked:
            console.print(Text(f"  stored {e.stop.stored}"), Text(f"  asked  {e.stop.asked}"), sep="\n")
        if e.marks:
            taken = ", ".join(f"{mark} for {token}" for token, mark in sorted(e.marks.items()))
            console.print(Text(f"control tokens taken as equal: {taken}", style="dim"))


def _telling(found: Sequence[Explanation]) -> list[str]:
    """The facts in which the models of a folder differ: which build, host or exactness each is of."""
    keys = sorted({key for e in found for key in e.facts} - {"model"})
    return [key for key in keys if len({str(e.facts.get(key)) for e in found}) > 1]


def _heading(e: Explanation, telling: Sequence[str]) -> str:
    shape = e.identity.shape_hash.hex()[:12]
    name = f"{e.facts['model']}  {shape}" if "model" in e.facts else shape
    facts = "".join(f", {key} {str(e.facts[key])[:24]}" for key in telling if key in e.facts)
    salted = ", salted" if e.identity.salt else ""
    n_nodes = "1 node" if e.n_nodes == 1 else f"{e.n_nodes} nodes"
    return f"model {name}  (n_ctx {e.identity.n_ctx}{facts}{salted}, {n_nodes})"


def _usable(e: Explanation) -> str:
    """What could be restored; how many tokens of a block are text alone cannot tell."""
    blocks = f"{e.n_usable} tokens" if e.n_usable else ""
    if e.is_inside:
        blocks = f"{blocks} and part of the next block" if blocks else "part of the first block"
    return f"{blocks or 'nothing'} could be restored"


def _print_path(e: Explanation) -> None:
    rows: list[tuple[Sequence[str], bytes | str]] = []
    for node in (*e.path, *((e.partial,) if e.partial is not None else ())):
        n = len(node.meta.tokens)
        shared = n if node is not e.partial else e.n_shared
        span = f"{node.meta.start}-{node.meta.start + n}"
        parts = ", ".join(f"{k.name.lower()} {show_bytes(f.n_bytes)}" for k, f in sorted(node.files.items()))
        used = _ago(max(file.mtime for file in node.files.values()))
        rows.append(((span, "in part" if shared is None else str(shared), parts, used), node.meta.text))
    _print_listing((">tokens", ">shared", "parts", "used"), rows)


def totals(facts: dict[str, Any]) -> None:
    """What `stats` counted."""
    made = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        if isinstance(value, dict):
            shown = "\n".join(f"{name} {show_bytes(n)}" for name, n in sorted(value.items()))
        else:
            shown = show_bytes(value) if key.startswith("bytes") else str(value)
        made.add_row(Text(key.replace("_", " "), style="bold"), Text(shown))
    _console().print(made)


def pruned(result: dict[str, Any]) -> str:
    """One sentence about a prune."""
    would = "would be removed" if result["dry_run"] else "removed"
    return f"{result['nodes']} nodes, {show_bytes(result['bytes'])} {would}"


def simulated(results: Sequence[dict[str, Any]]) -> None:
    """Hit rates by budget."""
    made = Table(box=None, pad_edge=False)
    for name in ("budget", "hit rate", "tokens matched", "written", "evictions", "refused"):
        made.add_column(name, justify="right")
    for row in results:
        made.add_row(
            show_bytes(row["max_bytes"]),
            f"{100 * row['hit_rate']:.1f} %",
            f"{row['tokens_matched']} / {row['tokens_asked']}",
            show_bytes(row["bytes_written"]),
            str(row["evictions"]),
            str(row["refused"]),
        )
    _console().print(made)
