"""How `kvc` shows things to a person: tables and trees on the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

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

_TREE_DEPTH = 400  # rich draws recursively; a longer chain is cut and says so


def _console() -> Console:
    return Console(soft_wrap=False)


def _ago(seconds: float) -> str:
    age = max(0.0, time.time() - seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age >= size:
            return f"{age / size:.0f} {unit} ago"
    return f"{age:.0f} s ago"


def one(facts: dict[str, Any]) -> None:
    """Everything about one file."""
    table = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        if key == "tokens":
            value = f"{' '.join(map(str, value[:24]))}{' …' if len(value) > 24 else ''}"
        elif key.endswith("bytes") and isinstance(value, int):
            value = f"{value} ({show_bytes(value)})"
        table.add_row(Text(key, style="bold"), Text(str(value)))
    _console().print(table)


def table(files: Sequence[StoredFile]) -> None:
    """One line per file, and totals."""
    made = Table(box=None, pad_edge=False)
    for name, justify in (("name", "left"), ("part", "left"), ("tokens", "right"), ("size", "right")):
        made.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # two literals
    for name in ("reason", "used", "text"):
        made.add_column(name, no_wrap=True, overflow="ellipsis")
    for file in files:
        if file.header is None or file.meta is None:
            damaged = Text(file.path.rsplit("/", 1)[-1][:16], style="red")
            made.add_row(
                damaged, "", "", show_bytes(file.n_bytes), "", _ago(file.mtime), Text(str(file.damage))
            )
            continue
        meta = file.meta
        span = f"{meta.start}-{meta.start + len(meta.tokens)}"
        made.add_row(
            meta.name.hex()[:12],
            file.header.kind.name.lower(),
            span,
            show_bytes(file.n_bytes),
            file.header.reason.name.lower(),
            _ago(file.mtime),
            Text(show_text(meta.text, 60)),
        )
    console = _console()
    console.print(made)
    console.print(f"{len(files)} files, {show_bytes(sum(file.n_bytes for file in files))}")


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
    label = Text(parts, style="red" if node.is_orphan else "bold")
    label.append(f"  {text}", style="dim")
    if node.is_orphan:
        label.append("  orphan", style="red")
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


def verdict(n_files: int, wrong: Sequence[dict[str, Any]]) -> None:
    """What `verify` found."""
    console = _console()
    for item in wrong:
        console.print(Text(f"{item['path']}: {item['what']}", style="red"))
    console.print(f"{n_files} files, {len(wrong)} wrong" if wrong else f"{n_files} files, all clean")


def explained(found: Sequence[Explanation], asked: Asked) -> None:
    """What of a prompt would be reused, a model after the other."""
    console = _console()
    if not found:
        console.print("nothing is stored here")
    for e in found:
        facts = "".join(f", {key} {str(value)[:24]}" for key, value in sorted(e.facts.items()))
        salted = ", salted" if e.identity.salt else ""
        head = f"model {e.identity.shape_hash.hex()[:12]}  (n_ctx {e.identity.n_ctx}{facts}{salted})"
        console.print(Text(f"{head}  {e.n_nodes} nodes", style="bold"))
        if e.path or e.partial is not None:
            console.print(_explained_path(e))
        matched = f"{e.n_matched} of {len(asked)} {asked.unit}s match, {_usable(e)}"
        console.print(Text(matched), Text(f"{e.stop.why}: {e.stop.message}"), sep="\n")
        if e.stop.stored or e.stop.asked:
            console.print(Text(f"  stored {e.stop.stored}"), Text(f"  asked  {e.stop.asked}"), sep="\n")
        if e.marks:
            taken = ", ".join(f"{mark} for {token}" for token, mark in sorted(e.marks.items()))
            console.print(Text(f"control tokens taken as equal: {taken}", style="dim"))


def _usable(e: Explanation) -> str:
    more = " and part of the next block" if e.is_inside else ""
    return f"{e.n_usable} tokens{more} could be restored"


def _explained_path(e: Explanation) -> Table:
    made = Table(box=None, pad_edge=False)
    for name, justify in (("tokens", "right"), ("shared", "right"), ("parts", "left")):
        made.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # two literals
    for name in ("used", "text"):
        made.add_column(name, no_wrap=True, overflow="ellipsis")
    for node in (*e.path, *((e.partial,) if e.partial is not None else ())):
        n = len(node.meta.tokens)
        shared = n if node is not e.partial else e.n_shared
        parts = ", ".join(f"{k.name.lower()} {show_bytes(f.n_bytes)}" for k, f in sorted(node.files.items()))
        made.add_row(
            f"{node.meta.start}-{node.meta.start + n}",
            "in part" if shared is None else str(shared),
            parts,
            _ago(max(file.mtime for file in node.files.values())),
            Text(show_text(node.meta.text, 40)),
        )
    return made


def totals(facts: dict[str, Any]) -> None:
    """What `stats` counted."""
    made = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {show_bytes(n)}" for name, n in sorted(value.items()))
        else:
            shown = show_bytes(value) if key.startswith("bytes") else str(value)
        made.add_row(Text(key.replace("_", " "), style="bold"), shown)
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
