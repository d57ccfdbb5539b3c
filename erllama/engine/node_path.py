"""The stored nodes that hold the beginning of a sequence, from the root on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class NodePath:
    """Names and ends of nodes, in order. A save continues behind the last one."""

    nodes: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens that the nodes hold together."""
        return self.nodes[-1][1] if self.nodes else 0

    @property
    def tip(self) -> bytes | None:
        """Name of the last node; None without any."""
        return self.nodes[-1][0] if self.nodes else None

    def add(self, name: bytes, end: int) -> None:
        """One more node behind the last."""
        assert end > self.end
        self.nodes.append((name, end))

    def drop_last(self) -> None:
        """Forget the last node."""
        self.nodes.pop()

    def cut_to(self, n: int) -> None:
        """Forget nodes that reach beyond `n` tokens."""
        while self.end > n:
            self.nodes.pop()

    def up_to(self, n: int) -> NodePath:
        """A copy with the nodes within the first `n` tokens."""
        return NodePath([node for node in self.nodes if node[1] <= n])
