"""Helpers for testing code that uses erllama, and erllama itself.

What lives here: `FakeBackend` (an arithmetic model without weights), `ScriptedClient`-like readers and
`cancel_at_every_checkpoint`. It may use everything but `server` and `cli`; nothing in erllama uses it.
"""

from .cancelling import CheckpointLimit as CheckpointLimit
from .cancelling import cancel_at_every_checkpoint as cancel_at_every_checkpoint
from .fake import FakeBackend as FakeBackend
from .fake import FakeSampler as FakeSampler
from .fake import Script as Script
