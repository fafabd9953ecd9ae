from __future__ import annotations

import io
from dataclasses import replace
from html import unescape

import pytest
from rich.cells import cell_len
from rich.console import Console

from fusion_advisor import units
from fusion_advisor.records import GenerationCheck, Status, Tolerance
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import background_rows, kernel_rows, quality, shared_rows
from fusion_advisor.report.headline import headline
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.terminal.layout import Column, column_table, simple_table
from fusion_advisor.report.terminal.result import apply_table, details, result_table, summary_line
from fusion_advisor.report.training.rows import gradient_line
from tests.report.fixtures import ALL, applied, numerics, profiled, timing, trained, with_a_copy

WIDTHS = (40, 60, 80, 100, 120)


def shown(name: str, width: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=False, color_system=None, highlight=False, markup=False)
    console.print(result_table(ALL[name](), console))
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_too_wide(name: str, width: int) -> None:
    lines = shown(name, width)
    assert max(cell_len(line) for line in lines) <= width
    for char in ("\x1b", "\u202e", "\x07"):
        assert char not in "\n".join(lines)


@pytest.mark.parametrize("name", ALL)
def test_ascii_terminals_get_ascii(name: str) -> None:
    lines = shown(name, 80, "ascii")
    assert "\n".join(lines).isascii()
    assert max(cell_len(line) for line in lines) <= 80


def test_columns_are_dropped_in_order() -> None:
    heads = {width: next(line.split() for line in shown("profiled", width) if line.startswith("#")) for width in (60, 80, 120)}
    assert heads[120] == ["#", "Chain", "Sites", "Kernels", "GPU", "ms", "Share", "Save", "ms", "Kernel"]
    assert "Save" in heads[80]
    assert "Kernels" not in heads[60]
    assert {"Chain", "Share", "Kernel"} <= set(heads[60])
    for width in (60, 80, 120):
        assert "Verdict" in next(line for line in shown("applied", width) if line.startswith("ID"))


def test_a_narrow_terminal_gets_two_lines_for_a_row() -> None:
    lines = shown("applied", 40)
    at = lines.index("ID  Rewrite")
    assert lines[at + 1].split() == ["Step", "Verdict"]
    for number, fusion in enumerate((*applied().rewrites, *applied().fusions)):
        name, rest = lines[at + 2 + 2 * number : at + 4 + 2 * number]
        assert name.strip().startswith(fusion.id) and rest.endswith(shared_rows.VERDICTS[fusion.status].words)
    assert lines.count("ID  Rewrite") == 1 and "ID  Rewrite" not in shown("applied", 60)


@pytest.mark.parametrize(("encoding", "dots"), [("utf-8", "…"), ("ascii", "..")])
@pytest.mark.parametrize("width", [16, 20, 24, 30, 40])
def test_nothing_is_cut_without_a_sign(width: int, encoding: str, dots: str) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=width, color_system=None, highlight=False)
    columns = [
        Column("Name", ("first_of_these_names", "b"), flex_min=8),
        Column("Time", ("1,234.50 ms", "1 ms"), is_right=True),
        Column("Dropped", ("x" * 30, "x"), drop=1),
        Column("Verdict", ("within noise, removed", "kept")),
    ]
    for chosen in (columns, columns[1::-1]):
        lines = column_table(chosen, console).plain.split("\n")
        assert max(map(cell_len, lines)) <= width
        for word in [column.cells[0] for column in chosen if not column.drop]:
            (found,) = [line for line in lines if word[:2] in line]
            start = found.index(word[:2])
            cut = found[start : start + len(word)]
            assert cut == word or cut.split("  ")[0].rstrip().endswith(dots), found


@pytest.mark.parametrize("width", [60, 80])
def test_names_that_begin_alike_keep_the_words_in_which_they_differ(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    begin = "values that depend on weights and buffers alone and that "
    columns = [
        Column("Rewrite", (f"{begin}never change", f"{begin}occur twice", "merged GEMMs"), flex_min=24),
        Column("Verdict", ("✓ kept", "~ within noise, removed", "✓ kept")),
    ]
    lines = column_table(columns, console).plain.split("\n")[1:]
    assert "never change" in lines[0] and "occur twice" in lines[1] and "merged GEMMs" in lines[2]
    assert max(map(cell_len, lines)) <= width


def test_figures_are_the_reports_own() -> None:
    report = profiled()
    text = "\n".join(shown("profiled", 120))
    for chain in report.chains:
        assert units.milliseconds(chain.device_ns) in text
        assert units.share(chain.share) in text
    assert "none (FA603)" in text
    text = "\n".join(shown("applied", 120))
    for fusion in applied().fusions:
        if fusion.step_delta_ns is not None:
            assert units.delta(fusion.step_delta_ns) in text
    assert "✓ kept" in text
    assert "✗ wrong numbers, removed" in text
    assert "~ within noise, removed" in text


def test_a_kernel_that_a_rewrite_put_in_is_named_and_shown_if_asked() -> None:
    def told(**options: bool) -> str:
        printed = io.StringIO()
        console = Console(width=120, file=printed)
        console.print(details(with_a_copy(applied()), console, **options))
        return printed.getvalue()

    assert "kernels/fold-constants_permuted_copy_0a1b2c.cu" in told() and "__global__ void fa_permuted" not in told()
    assert "__global__ void fa_permuted" in told(with_source=True)


def test_what_limits_the_figures_is_said() -> None:
    text = " ".join("\n".join(shown("on_cpu", 80)).split())
    assert "Random weights" in text
    assert "Only 2 of 24 layers" in text
    assert "CPU" in text
    assert "GPU ms" not in text
    assert "No chain of pointwise or reduction ops was found" in "\n".join(shown("empty", 80))


def test_a_run_that_was_interrupted_before_its_rewrites_does_not_blame_the_chains() -> None:
    report = replace(applied(), fusions=(), rewrites=(), status="interrupted")
    printed = io.StringIO()
    console = Console(file=printed, width=120)
    console.print(result_table(report, console))
    assert "No rewrite was tried: the run was interrupted before." in printed.getvalue()


def test_a_limit_of_the_users_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(applied(), tolerance=Tolerance(rtol=0.01, atol=1e-3))
    monkeypatch.setitem(ALL, "asked", lambda: asked)
    caveat = "limit on errors is the user's, not eager's own error: |error| ≤ 0.001 + 0.01 × |oracle|"
    for name, is_named in (("asked", True), ("applied", False)):
        text = " ".join("\n".join(shown(name, 200)).split())
        assert (caveat in text) is is_named
        assert ("umerics ✓ within --rtol and --atol" in text) is is_named
    assert all("limit on errors is the user" in render(asked) for render in (render_markdown, render_html))


def test_a_training_step_is_told_by_module_and_by_kernel() -> None:
    text = " ".join("\n".join(shown("training", 120)).split())
    assert "(wall time): kernels of the forward pass 5.12 ms, of the backward pass 10.88 ms." in text
    assert "loss (the model's own) and backward in train() mode, without an optimizer" in text
    assert "transformer.h.*.mlp.c_fc 24 96 4.00 ms 8.00 ms 75.0%" in text
    assert "outside every submodule 1 9 120 µs 380 µs 3.1%" in text
    assert "No chain" not in text
    for render in (render_markdown, render_html):
        page = render(ALL["training"]())
        assert "transformer.h.*.mlp.c_fc" in page and "8.00 ms" in page and "75.0%" in page
        assert "No chain" not in page


def test_a_rewritten_training_step_names_the_pass_of_each_row() -> None:
    report = trained()
    text = " ".join("\n".join(shown("trained", 200)).split())
    assert "faster than eager" in text and "per training step (forward, loss, backward) (wall time)" in text
    assert "F2 gelu_tanh forward 23/24" in text and "F1 rms_norm backward 49/49" in text
    assert "fold-constants-backward backward 1" in text
    words = "2 gradients compared with float64, all within the limit. Nearest to its limit: gradient of"
    for page in (text, render_markdown(report).replace("\\", ""), unescape(render_html(report))):
        assert words in page and "transformer.h.3.ln_1.weight" in page and "0.93 × eager's own" in page
        assert "Share of kernel time in chains: " in page
    assert "| Fusion | Pass | Sites replaced |" in render_markdown(report)
    page = render_html(report)
    assert page.count('<th scope="col">Pass</th>') == 2 and "<td>backward</td>" in page and "<td>forward</td>" in page
    assert "transformer.h.*.mlp.c_fc" in page and "of both passes, ranked by their share" in page
    assert "Pass" not in "\n".join(shown("applied", 200)) and '<th scope="col">Pass</th>' not in render_html(applied())


def test_the_gradient_line_says_what_failed_and_is_empty_without_gradients() -> None:
    check = trained().model_check
    assert check is not None
    assert gradient_line(replace(check, outputs=("logits",))) == ""
    failed = gradient_line(replace(check, is_passed=False, outputs=check.outputs[:2], worst="loss", eager_rel_l2=0.0))
    assert failed.startswith("1 gradient compared with float64, not within the limit. Nearest to its limit: `loss` (")


def test_an_unchanged_model_has_no_speedup() -> None:
    """Before and after are one measurement then; a ratio of it with itself would look like a result."""
    report = applied()
    report = replace(report, after=replace(report.before, label=shared_rows.UNCHANGED), model_check=None, baselines=())
    assert headline(report).text.startswith("Nothing paid, so the model was left as it was: ")
    assert shared_rows.comparisons(report) == ()
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(result_table(report, console))
    assert "→" not in captured.get().partition("Nothing paid")[2]
    assert "not checked" not in captured.get()


def test_only_what_is_wrong_is_a_warning() -> None:
    report = replace(applied(), noise_share=0.4, warnings=())
    report = replace(
        report, quality=replace(report.quality, graph_breaks=(), warnings=(), joined_share=1.0, launches=3, kernels=3)
    )
    assert quality.warnings(report) == ("Noise: the same step timed twice differs by 40.0%. Smaller gains count as none.",)
    assert quality.verdict(report)[0] == "warn"


def test_markup_in_names_is_text() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(simple_table(("A", "B"), [("[/]", "[bold]x[/bold] [link=http://x]")], console))
    assert "[bold]x[/bold]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_one_line_for_quiet() -> None:
    assert summary_line(applied()).startswith("1.19× faster than eager")


def test_a_generation_is_told_in_sentences() -> None:
    check = GenerationCheck(
        prompt_tokens=128, new_tokens=32, prefill_before_ns=9_000_000, decode_before_ns=20_000_000, before=timing(700_000_000),
        prefill_after_ns=8_000_000, decode_after_ns=5_000_000, after=timing(200_000_000),
    )  # fmt: skip
    work = replace(applied().workload, phase="generate", seq_len=128, new_tokens=32)
    report = replace(applied(), workload=work, generation=check)
    assert shared_rows.context_line(report).endswith("× 128 + 32 new")
    text = " ".join(shared_rows.generation_lines(report))
    assert "128 prompt + 32 new tokens in 700.00 ms → 200.00 ms" in text and "decode step 20.00 ms → 5.00 ms" in text
    assert "All 32 greedy tokens are eager's." in text
    parted = replace(report, generation=replace(check, first_divergence=7, logit_gap=0.0125, original_calls=2))
    lines = shared_rows.generation_lines(parted)
    assert lines[-1] == (
        "Greedy tokens part from eager's at new token 7, where eager's choice led by 0.0125. 2 of 32 steps ran the original ops."
    )
    assert shared_rows.generation_lines(applied()) == ()
    for page in (render_markdown(parted), render_html(parted)):
        assert "part from eager" in page


def test_a_decode_step_says_how_much_is_cached() -> None:
    work = replace(applied().workload, phase="decode", seq_len=1, context=512)
    report = replace(applied(), workload=work)
    assert "decode" in shared_rows.context_line(report) and shared_rows.context_line(report).endswith("× 1, 512 cached")
    assert ("Cached tokens", "512") in background_rows.environment_rows(report)


def test_faults_and_declared_exceptions_are_in_every_report() -> None:
    report = applied()
    checked = numerics()
    declared = replace(checked, declared=("12 elements are fp64's, where the original overflows",))
    wrong = replace(checked, is_passed=False, faults=("special rows: 3 of 8 elements are wrong",))
    first, second, *others = report.fusions
    out = replace(
        second, status=Status.WRONG_NUMBERS, chain_after=None, step_delta_ns=None, step_delta_ci_ns=None, numerics=wrong
    )
    rows = (replace(first, numerics=declared), out, *others)
    assert kernel_rows.special_line(replace(first, numerics=checked)) == ""
    shown = replace(report, fusions=rows)
    html = unescape(render_html(shown))
    assert "On special values: declared exceptions: 12 elements are fp64's, where the original overflows." in html
    assert "On special values: faults: special rows: 3 of 8 elements are wrong." in html
    text = render_markdown(shown).replace("\\", "")
    assert f"{first.id} on special values: declared exceptions: 12 elements are fp64" in text
    assert f"{second.id} on special values: faults: special rows: 3 of 8 elements are wrong" in text


def test_times_that_cannot_be_right_are_marked_in_every_report() -> None:
    report = applied()
    first, *others = report.fusions
    doubt = "the kernel took 7.96 µs, in which this device cannot move 1,572,864 bytes"
    marked = replace(first, chain_before=None, chain_after=None, predicted_saving_ns=None, implausible=doubt)
    shown = replace(report, fusions=(marked, *others))
    assert load_report(dump_report(shown)).fusions[0].implausible == doubt
    html = unescape(render_html(shown))
    assert f"Implausible, and left out: {doubt}." in html and ">implausible</td>" in html
    assert "its times alone are left out" in render_markdown(shown)
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    console.print(result_table(shown, console))
    console.print(apply_table(shown, console))
    assert "implausible" in stream.getvalue() and doubt in stream.getvalue()
    assert ">implausible<" not in render_html(report) and "times alone are left out" not in render_markdown(report)
