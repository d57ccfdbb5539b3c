"""The bench as a whole, on models of a moment: every workload gives figures, JSON and plots hold them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import trio

from erllama.bench.catalog import WORKLOADS, choose
from erllama.bench.figure import single
from erllama.bench.llama_bench import read_rate
from erllama.bench.own import open_own
from erllama.bench.plot import Chart
from erllama.bench.programs import find_programs
from erllama.bench.prompts import Prompts
from erllama.bench.run import UNFINISHED, Request, run_bench
from erllama.bench.settings import Settings
from erllama.bench.workload import Workload
from erllama.errors import EngineError, InvalidOption, NativeLibraryError

SVG = "{http://www.w3.org/2000/svg}"


def asked(path, **more):
    return Request(default_model=path, model=path, n_runs=1, quick=True, **more)


def words(text):
    return [sum(map(ord, word)) for word in text.split()]


def test_workloads_are_chosen_by_name():
    """In the catalogue's order, whatever the case; all of them for none."""
    assert [w.id for w in choose(["p6", "P1B"])] == ["P1b", "P6"]
    assert choose([]) == list(WORKLOADS)
    with pytest.raises(InvalidOption, match="no workload 'P19'; there are P1, P1b"):
        choose(["P1", "P19"])


def test_the_catalogue_is_complete():
    """P1 to P18, and P1b."""
    assert {w.id for w in WORKLOADS} == {f"P{n}" for n in range(1, 19)} | {"P1b"}


def test_prompts_have_the_length_asked_for_and_differ_early():
    """The same key gives the same ids; another one differs within the first words."""
    prompts = Prompts(words, [1])
    assert len(prompts.prompt(300, 1, 2)) == 300
    assert prompts.prompt(300, 1, 2) == prompts.prompt(300, 1, 2)
    assert prompts.prompt(300, 1, 2)[:300] != prompts.prompt(300, 1, 3)[:300]
    assert prompts.prompt(9, 4)[:2] != prompts.prompt(9, 5)[:2]
    assert prompts.prompt(9, 4)[0] == 1


def test_programs_that_are_not_built_are_named_with_the_command(tmp_path):
    """What to run is in the message."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "llama-server").touch()
    with pytest.raises(
        NativeLibraryError, match=r"llama-bench not built.*build_libllama.py --with-server-tools"
    ):
        find_programs(tmp_path)
    (tmp_path / "tools" / "llama-bench").touch()
    assert find_programs(tmp_path).server == tmp_path / "tools" / "llama-server"


def test_llama_benchs_json_is_found_between_its_log():
    """Its log goes the same way; something else is an error, not a figure."""
    text = 'load: x\n[\n  {\n    "n_prompt": 4,\n    "avg_ts": 12.5\n  }\n]\nbye\n'
    assert read_rate(text) == 12.5
    for wrong in ("", "[\n]\n", "error: no model"):
        with pytest.raises(EngineError, match="cannot be read"):
            read_rate(wrong)


@pytest.mark.parametrize("log_y", [False, True])
def test_a_plot_places_its_points(log_y):
    """Further right is more, higher is more; names and labels are text of the picture."""
    series = {"a <b>": [(1.0, 0.02), (16.0, 3.0)], "c": [(4.0, 0.5)]}
    chart = Chart(title="T", x_label="x & y", y_label="s", series=series, log_y=log_y)
    tree = ET.fromstring(chart.svg())
    points = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter(f"{SVG}circle")]
    assert len(points) == 3
    (x1, y1), (x16, y16), (x4, y4) = points
    assert x1 < x4 < x16
    assert y1 > y4 > y16
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert {"T", "x & y", "a <b>", "c", "16"} <= set(texts)


def workloads_of(*measures):
    """Workloads A, B, …"""
    return [
        Workload(id=name, title=name, compared="", measure=measure)
        for name, measure in zip("ABC", measures, strict=False)
    ]


def written_workloads(report):
    """By id, from the file."""
    return {w["id"]: w for w in json.loads(report.read_text())["workloads"]}


async def fine(settings, found):
    await found.add(single("x", "s", [1.0]), notes=("fine",))


async def broken(settings, found):
    raise EngineError("it is broken")


async def broken_together(settings, found):
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(broken, settings, found)


async def buggy(settings, found):
    await found.add(single("x", "s", [1.0]))
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("measure", "failure", "said"),
    [
        (broken, "it is broken", "not measured: it is broken"),
        (broken_together, "it is broken", "not measured: it is broken"),
        (buggy, "ZeroDivisionError: by nothing", "ended early: ZeroDivisionError"),
    ],
)
async def test_a_workload_that_fails_does_not_end_the_run(tmp_path, capsys, measure, failure, said):
    """Its reason is printed and written, also out of tasks of its own; the next one runs. A bug is shown."""
    report = tmp_path / "r.json"
    outcomes = await run_bench(
        asked(Path("m.gguf"), workloads=workloads_of(measure, fine), json=report, plots=tmp_path / "p")
    )
    assert [outcome.failure for outcome in outcomes] == [failure, None]
    told = capsys.readouterr()
    assert said in told.out
    assert ("in buggy" in told.err) == (measure is buggy)
    written = written_workloads(report)
    assert (written["A"]["failure"], written["B"]["failure"]) == (failure, None)
    assert len(written["A"]["figures"]) == (measure is buggy)


@pytest.mark.parametrize("n_before", [0, 1])
async def test_what_was_measured_is_written_when_the_run_is_interrupted(tmp_path, capsys, n_before):
    """Ctrl-C after an hour leaves that hour's figures, of the interrupted workload too."""

    async def interrupted(settings, found):
        for i in range(n_before):
            await found.add(single(f"figure {i}", "s", [1.0]))
        raise KeyboardInterrupt

    report = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        await run_bench(asked(Path("m.gguf"), workloads=workloads_of(fine, interrupted, fine), json=report))
    written = written_workloads(report)
    assert (written["A"]["failure"], written["B"]["failure"]) == (None, UNFINISHED)
    assert "C" not in written
    assert len(written["B"]["figures"]) == n_before
    assert f"{'ended early' if n_before else 'not measured'}: {UNFINISHED}" in capsys.readouterr().out


async def test_each_figure_is_in_the_file_at_once(tmp_path):
    """Who is killed has what was found until then; an earlier run's file stays until the first figure."""
    report = tmp_path / "r.json"
    report.write_text("old")
    seen = []

    async def looking(settings, found):
        seen.append(report.read_text())
        await found.add(single("first", "s", [1.0]))
        seen.append(written_workloads(report))

    await run_bench(asked(Path("m.gguf"), workloads=workloads_of(looking), json=report))
    before, during = seen
    assert before == "old"
    assert [f["name"] for f in during["A"]["figures"]] == ["first"]
    assert during["A"]["failure"] == UNFINISHED
    assert written_workloads(report)["A"]["failure"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


async def test_a_file_that_cannot_be_written_is_found_before_measuring(tmp_path):
    """Not after an hour."""
    measured = []

    async def measure(settings, found):
        measured.append(1)

    with pytest.raises(FileNotFoundError):
        await run_bench(
            asked(Path("m.gguf"), workloads=workloads_of(measure), json=tmp_path / "none" / "r.json")
        )
    assert measured == []


@pytest.mark.model
@pytest.mark.slow
async def test_every_workload_gives_figures_on_a_tiny_model(tmp_path, tiny_gguf, capsys):
    """Nothing fails, every figure has a name and a value, and no bar is judged at these sizes."""
    report, plots = tmp_path / "r.json", tmp_path / "plots"
    workloads = [w for w in WORKLOADS if w.id not in ("P17", "P18")]  # they need a window
    await run_bench(asked(tiny_gguf("dense"), workloads=workloads, json=report, plots=plots, folder=tmp_path))
    written = json.loads(report.read_text())
    assert written["schema"] == 1
    assert written["flags"]["quick"] is True
    assert {"machine", "versions", "started"} <= written.keys()
    for workload in written["workloads"]:
        assert workload["failure"] is None, workload
        assert workload["figures"], workload
        assert all(figure["met"] is None for figure in workload["figures"])
    figures = {w["id"]: {f["name"]: f["ours"]["median"] for f in w["figures"]} for w in written["workloads"]}
    # Counts hold on any machine, at any size.
    assert 0.9 < figures["P5"]["most written in a turn, of its new tokens' KV"] <= 1.1
    assert figures["P7"]["computed after an edit, from RAM"] == figures["P7"]["computed after the edit"]
    assert figures["P6"]["erllama: computed, of one head and the tails"] == pytest.approx(1, abs=0.05)
    assert figures["P15"]["computed of the new chat"] <= 240
    assert figures["P16"]["computed of the long chat + 20"] <= 84
    assert all(n == 0 for name, n in figures["P14"].items() if name.startswith("left behind"))
    assert {path.name for path in plots.iterdir()} == {"first-token.svg", "throughput.svg"}
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.model
@pytest.mark.slow
async def test_windows_are_restored_with_the_same_answer(tmp_path, tiny_gguf):
    """P17 and P18 on a window: nothing differs, and one more place costs the window's parts at most."""
    outcomes = await run_bench(asked(tiny_gguf("window"), workloads=choose(["P17", "P18"]), folder=tmp_path))
    assert [outcome.failure for outcome in outcomes] == [None, None]
    restored, places = ({f.name: f for f in outcome.figures} for outcome in outcomes)
    assert restored["answers with other ids than the cold one"].met
    assert restored['answers of exact="cold" with other bits'].met
    assert all(figure.met for figure in places.values())


@pytest.mark.model
@pytest.mark.slow
async def test_chats_and_restores_of_a_window_are_measured_by_what_it_keeps(tmp_path, tiny_gguf):
    """P3, P5: a token is counted in all layers, though the model's memory holds few of them."""
    path = tiny_gguf("window")
    restored, grown = await run_bench(asked(path, workloads=choose(["P3", "P5"]), folder=tmp_path))
    assert (restored.failure, grown.failure) == (None, None)
    assert not any("memcpy" in figure.name for figure in restored.figures)
    [beside] = [note for note in restored.notes if "the other prompt still ran" in note]
    assert ": 1 computed, from ram, " in beside  # it had lost its place in memory
    settings = Settings(model=path, folder=tmp_path, n_threads=1)
    n_bytes = []
    for n_ctx in (512, 4096):
        async with open_own(settings, n_ctx=n_ctx) as own:
            await own.ask(own.prompts.prompt(300, 1), 1, cache=True)
            await own.engine.cache.flush()
            n_bytes.append(own.kv_bytes_per_token)
    assert n_bytes[0] == n_bytes[1] > 0


@pytest.mark.model
@pytest.mark.slow
async def test_a_state_is_stored_as_it_is(tmp_path, tiny_gguf):
    """P18 on a hybrid: one more place costs its state."""
    (outcome,) = await run_bench(asked(tiny_gguf("hybrid"), workloads=choose(["P18"]), folder=tmp_path))
    assert outcome.failure is None
    assert all(figure.met for figure in outcome.figures)


@pytest.mark.model
async def test_window_workloads_measure_no_other_kind(tmp_path, tiny_gguf):
    """On dense memory they say that there is nothing to measure."""
    outcomes = await run_bench(asked(tiny_gguf("dense"), workloads=choose(["P17", "P18"]), folder=tmp_path))
    assert all("window" in (outcome.failure or "") for outcome in outcomes)
