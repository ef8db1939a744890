"""What the command shows: progress while it works, tables of the report, and the plan of a dry run."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_primal.initialise import Progress as Tell
from hf_primal.report import ConversionReport

STAGES = {"observe": "watch attention, fit", "refine": "match outputs", "measure": "rebuild, measure"}


@contextmanager
def progress(console: Console) -> Iterator[Tell]:
    """Progress bars, one a stage; the function to report through."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int, detail: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES[stage], total=total, detail="")
            bars.update(tasks[stage], completed=done, detail=detail)

        yield tell


def show_report(console: Console, report: ConversionReport) -> None:
    """The report as tables."""
    rank = report.settings["rank"]
    table = Table(
        "layer", "heads", f"energy kept at rank {rank}", "output error", "after refinement", title="Replaced layers"
    )
    for layer in report.layers:
        refined = "-" if layer.error_refined is None else f"{layer.error_refined:.4f}"
        heads = f"{layer.heads} x {layer.head_dim}"
        table.add_row(str(layer.index), heads, f"{layer.energy:.3f}", f"{layer.error_closed_form:.4f}", refined)
    console.print(table)
    kept = report.fidelity
    where = "calibration data (too little to hold any out)" if kept.calibration_data else "held-out text"
    console.print(
        f"Whole model, {kept.sequences} sequences of {where}: "
        f"hidden-state cosine [bold]{kept.hidden_cosine:.4f}[/bold]",
        end="",
    )
    console.print("" if kept.logits_kl is None else f", KL of the logits [bold]{kept.logits_kl:.4g}[/bold] nats")
    before, after = report.parameters_teacher, report.parameters_converted
    console.print(f"Parameters: {before:,} -> {after:,} ({(after - before) / before:+.2%})")
    if report.latency:
        table = Table(
            "tokens", "teacher ms", "converted ms", "speed-up", title=f"Latency, one sequence, {report.device}"
        )
        for row in report.latency:
            table.add_row(str(row.tokens), f"{row.teacher_ms:.1f}", f"{row.converted_ms:.1f}", f"{row.speedup:.2f}")
        console.print(table)
        longest = report.latency[-1].tokens
        if report.break_even_tokens is None:
            console.print(f"Break-even: beyond {longest} tokens, the longest measured")
        else:
            shortest = report.break_even_tokens == report.latency[0].tokens
            console.print(f"Break-even: {'at most' if shortest else 'about'} {report.break_even_tokens} tokens")
    for note in report.notes:
        console.print(f"Note: {note}", style="yellow")
