"""The synchronous binding to llama.cpp: models, contexts, batches, vocabulary, samplers, logs.

Lives here: everything that sees a cffi object, the declarations (`cdef/`), our C++ (`shim*`), and
the checks of every precondition that llama.cpp would abort on. Knows nothing of trio or of requests.
May be called by: engine, runtime, cli, tools. Calls: erllama.errors, erllama.files,
erllama.options, erllama.types.
Importing it loads no native code; the first `Model.open` (or `ensure_backend`) does.
"""

from .abort import Abort as Abort
from .adapter import Adapter as Adapter
from .backend import BuildInfo as BuildInfo
from .backend import Device as Device
from .backend import build_info as build_info
from .backend import devices as devices
from .backend import ensure_backend as ensure_backend
from .backend import resume_logs as resume_logs
from .backend import shutdown_logs as shutdown_logs
from .batch import Batch as Batch
from .chat import Applied as Applied
from .chat import ChatParser as ChatParser
from .chat import ChatTemplates as ChatTemplates
from .chat import live_texts as live_texts
from .chat import schema_to_grammar as schema_to_grammar
from .context import Context as Context
from .facts import ModelFacts as ModelFacts
from .facts import SamplingFacts as SamplingFacts
from .memory import Memory as Memory
from .memory import MemoryKind as MemoryKind
from .model import LoadProgress as LoadProgress
from .model import Model as Model
from .params import ContextParams as ContextParams
from .readout import forward_argmax as forward_argmax
from .rows import DecodedRows as DecodedRows
from .rows import decode_rows as decode_rows
from .rows import sample_rows as sample_rows
from .sampler import SamplerChain as SamplerChain
from .sampler import SamplerParams as SamplerParams
from .sampler import check_grammar as check_grammar
from .sampler import live_samplers as live_samplers
from .sizing import MemoryUse as MemoryUse
from .sizing import estimate as estimate
from .vocab import Vocab as Vocab
