"""Helpers for testing code that uses erllama, and erllama itself.

What lives here: `FakeBackend` (an arithmetic model without weights), `scripted_client` (a reader that
reads, sleeps, cancels and leaves as told) and `cancel_at_every_checkpoint`. It may use everything but
`server` and `cli`; nothing in erllama uses it.
"""

from .cancelling import CheckpointLimit as CheckpointLimit
from .cancelling import cancel_at_every_checkpoint as cancel_at_every_checkpoint
from .client import Cancel as Cancel
from .client import ClientLog as ClientLog
from .client import Leave as Leave
from .client import Pause as Pause
from .client import Read as Read
from .client import scripted_client as scripted_client
from .fake import FakeBackend as FakeBackend
from .fake import FakeSampler as FakeSampler
from .fake import Script as Script
from .fake_embedder import FakeEmbedder as FakeEmbedder
from .fake_embedder import fake_vector as fake_vector
