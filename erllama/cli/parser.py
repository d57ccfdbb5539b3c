"""What can be typed after `erllama`, and the help that teaches it."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from erllama.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

ABOUT = """\
Run local language models (GGUF files) with llama.cpp.

Try this first:
  erllama demo                                  watch a small model answer (fetched once, 98 MB)
  erllama chat                                  talk to it
  erllama generate -p "The capital of France is"
  erllama serve                                 OpenAI, Anthropic and Ollama clients, on port 8080
"""

CHAT_EXAMPLES = """\
commands: /help, /reset, /stats, /save FILE, /quit. A line that ends in \\ goes on in the next one.

examples:
  erllama chat -s "Answer in one sentence."
  erllama chat -m models/qwen.gguf --temperature 0.6 --reasoning off
  echo "Name three fruits." | erllama chat --max-tokens 40
      each line of standard input is a message

What has been read is kept on disk (in clear text, for you alone), so that the same beginning starts at
once the next time. --no-cache keeps nothing.
"""

GENERATE_EXAMPLES = """\
examples:
  erllama generate -p "The capital of France is" --max-tokens 8 --temperature 0
      continue a text with the small default model, always the same way
  erllama generate -m models/qwen.gguf -p "def fib(n):" --stop $'\\n\\n' --stats
      your own model; stop at an empty line; say how fast it was
  cat notes.txt | erllama generate --n-ctx 8192 --max-tokens 200
      the prompt comes from standard input (one trailing newline is dropped)
  erllama generate -p "Rate it: " --grammar rating.gbnf
      only what the grammar allows

What has been read is kept on disk (prompts and answers, in clear text, for you alone), so that a prompt
that begins like an earlier one starts at once. --no-cache keeps nothing.
"""

DEMO_EXAMPLES = """\
The demo fetches and loads SmolLM2-135M-Instruct, streams an answer, answers eight prompts one by one and
all together, and then shows what the cache is worth: a prompt of 2,000 tokens cold, again, continued, edited
in the middle, after a restart, and as the head of eight agents. It takes about a minute, keeps nothing, and
needs no network once the model is there.
"""


SERVE_EXAMPLES = """\
examples:
  erllama serve
      the small default model under the name smollm2, on http://127.0.0.1:8080
  erllama serve -m qwen=models/qwen3-8b.gguf -m coder=models/coder.gguf --n-ctx 32768
      two models, loaded when they are first asked for
  erllama serve --config erllama.toml
      everything from a file; arguments win over it

OpenAI, Anthropic and Ollama clients: base URL http://127.0.0.1:8080/v1 for the first, without /v1 for the
others. Ctrl-C ends the server when answers in flight are done, at most five seconds later.
"""

BENCH_EXAMPLES = """\
examples:
  erllama bench --quick                     small sizes, a few minutes: does everything run?
  erllama bench P1 P6 --vs llama-server     decode throughput and shared prompts, beside llama.cpp's server
  erllama bench --vs llama-server --json bench.json --plots plots

Leave the machine alone meanwhile. llama-server comes from: python build_libllama.py --with-server-tools
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option when one does not exist."""

    def __init__(self, **options: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=layout, allow_abbrev=False, **options)

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with the usage and a hint for the first argument that nothing asked for."""
        known = [name for action in self._actions for name in action.option_strings]
        first = unknown[0].split("=")[0]
        near = difflib.get_close_matches(first, known, n=1) if first.startswith("-") else []
        hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
        self.error(f"unknown argument {first}; {hint}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The chosen command's arguments; `command` names its module, `parser` complains for it.

    Raises: SystemExit 0 after help, 2 after a mistake.
    """
    root, commands = _build()
    if not (sys.argv[1:] if argv is None else argv):
        root.print_help(sys.stderr)
        raise SystemExit(2)
    arguments, unknown = root.parse_known_args(argv)
    if unknown:
        commands[arguments.command].refuse_unknown(unknown)
    return arguments


def _build() -> tuple[Parser, dict[str, Parser]]:
    root = Parser(prog="erllama", description=ABOUT)
    root.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
    choices = root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    commands = {
        "chat": _add_chat(choices),
        "generate": _add_generate(choices),
        "demo": choices.add_parser(
            "demo", help="load a small model, answer, show batching and the cache", description=DEMO_EXAMPLES
        ),
        "serve": _add_serve(choices),
        "bench": _add_bench(choices),
        "version": choices.add_parser("version", help="versions of erllama, llama.cpp and the native build"),
    }
    for name, parser in commands.items():
        parser.set_defaults(command=name, parser=parser)
    return root, commands


def size(text: str) -> int:
    """A number of bytes; named as argparse is to call it in its complaint."""
    return parse_bytes(text)


class ShowVersion(argparse.Action):
    """`--version`; the version is looked up only when somebody asks."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print it and exit."""
        import erllama

        print(f"erllama {erllama.__version__}")
        parser.exit()


def _add_generate(choices: Any) -> Parser:
    parser: Parser = choices.add_parser(
        "generate",
        help="continue a prompt and print it as it comes",
        description=(
            "Continue a prompt and print the text as it comes. The prompt goes to the model as it is:\n"
            "one trained for chat wants its own marks around a question, see docs/guides/quickstart.md."
        ),
        epilog=GENERATE_EXAMPLES,
    )
    add = parser.add_argument
    add("-m", "--model", metavar="PATH", help="a GGUF file (default: SmolLM2-135M-Instruct, fetched once)")
    add("-p", "--prompt", metavar="TEXT", help="the text to continue (default: standard input)")
    add("--stats", action="store_true", help="afterwards, say on stderr how many tokens and how fast")

    generation = _add_shared(parser, max_tokens="64")
    generation.add_argument("--grammar", metavar="FILE", help="a GBNF file; only matching text is generated")
    return parser


def _add_chat(choices: Any) -> Parser:
    parser: Parser = choices.add_parser(
        "chat",
        help="talk to a model",
        description=(
            "Talk to a model through its own chat template. Ctrl-C ends an answer, Ctrl-D the conversation."
        ),
        epilog=CHAT_EXAMPLES,
    )
    add = parser.add_argument
    add("-m", "--model", metavar="PATH", help="a GGUF file (default: SmolLM2-135M-Instruct, fetched once)")
    add("-s", "--system", metavar="TEXT", help="the system message")
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    add("--tools", metavar="FILE", help="tools it may call (JSON, OpenAI's shape); you say what they give")
    add(
        "--reasoning",
        choices=("auto", "off", "inline"),
        default="auto",
        help="thinking told apart, asked for none, or left in the answer (default: auto)",
    )
    _add_shared(parser, max_tokens="as many as the model writes")
    return parser


def _add_shared(parser: Parser, *, max_tokens: str) -> Any:
    """What `generate` and `chat` have in common; returns the generation group."""
    options = parser.add_argument_group(
        "generation", "What is left out comes from the model file, and else is what stands in brackets."
    )
    add = options.add_argument
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"end after N tokens at the latest (default: {max_tokens})",
    )
    add("--temperature", type=float, metavar="T", help="0 always takes the likeliest token (0.8)")
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest; 0 is all (40)")
    add("--top-p", type=float, metavar="P", help="choose among the likeliest that sum up to P (0.95)")
    add("--min-p", type=float, metavar="P", help="drop tokens less likely than P × the likeliest (0.05)")
    add("--repetition-penalty", type=float, metavar="R", help="above 1 avoids repeating tokens (1.0)")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="the same seed gives the same text (default: drawn; --stats tells it)",
    )
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")

    kept = parser.add_argument_group("cache", "What is kept between runs, see docs/guides/caching.md.")
    add = kept.add_argument
    add("--no-cache", action="store_true", help="compute the whole prompt and keep nothing")
    add("--kv-dir", metavar="DIR", help="the folder (default: kv in erllama's cache folder)")
    add(
        "--kv-max",
        type=size,
        metavar="SIZE",
        help="its budget, as 500M or 20G (default: 4G, but at most a quarter of the free disk)",
    )

    machine = parser.add_argument_group("machine")
    add = machine.add_argument
    add(
        "--n-ctx",
        type=int,
        metavar="N",
        help="room for prompt and answer together, in tokens (default: 2048)",
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (default: physical cores, fewer while others are busy)",
    )
    return options


def _add_serve(choices: Any) -> Parser:
    parser: Parser = choices.add_parser(
        "serve",
        help="serve models over HTTP to OpenAI, Anthropic and Ollama clients",
        description="Serve models over HTTP, with the APIs of OpenAI, Anthropic and Ollama.",
        epilog=SERVE_EXAMPLES,
    )
    add = parser.add_argument
    add(
        "-m",
        "--model",
        action="append",
        metavar="NAME=PATH",
        help="a GGUF file and what clients call it (only PATH: its stem); may be given several times "
        "(default: smollm2, SmolLM2-135M-Instruct, fetched once)",
    )
    add("--config", metavar="FILE", help="a TOML file, see docs/guides/deployment.md")
    add("--host", metavar="ADDRESS", help="where to listen (default: 127.0.0.1, this machine only)")
    add("--port", type=int, metavar="N", help="(default: 8080; 0: any that is free)")
    add("--n-ctx", type=int, metavar="N", help="context length of models given with -m (default: 4096)")
    add(
        "--n-seq-max",
        type=int,
        metavar="N",
        help="requests that models given with -m answer at once (default: 4)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template instead of their own, for models given with -m",
    )
    add("--quiet", action="store_true", help="no line for each request")

    kept = parser.add_argument_group("cache", "What is kept between runs, see docs/guides/caching.md.")
    add = kept.add_argument
    add("--no-cache", action="store_true", help="keep nothing on disk")
    add("--kv-dir", metavar="DIR", help="the folder (default: kv in erllama's cache folder)")
    add("--kv-max", type=size, metavar="SIZE", help="its budget, as 500M or 20G")
    return parser


def _add_bench(choices: Any) -> Parser:
    parser: Parser = choices.add_parser(
        "bench",
        help="measure throughput, latency and cache, beside llama-server if wanted",
        description=(
            "Run workloads (all of them if none is named) and print what was measured, what it is\n"
            "compared with, and whether the bar was met. Runs of both sides take turns; figures are medians\n"
            "± half the distance between the quartiles."
        ),
        epilog=BENCH_EXAMPLES,
    )
    add = parser.add_argument
    add("workloads", nargs="*", metavar="WORKLOAD", help="P1, P1b, P2 … P18")
    add("--vs", choices=("llama-server",), help="ask llama.cpp's server the same, in the same run")
    add("--quick", action="store_true", help="small sizes, one run, no bar judged")
    add(
        "-m",
        "--model",
        metavar="PATH",
        help="a GGUF file for every workload (default: small ones, fetched once)",
    )
    add("--runs", type=int, metavar="N", help="counted runs of each side (default: 5; long ones: 2 or 3)")
    add("--threads", type=int, metavar="N", help="CPU threads of both sides (default: physical cores)")
    add("--json", metavar="FILE", help="write figures, machine, versions and flags there")
    add("--plots", metavar="DIR", help="write plots (SVG) there: first token, throughput")
    add(
        "--folder",
        metavar="DIR",
        help="where files of the disk tier go (default: the system's temporary folder)",
    )
    return parser
