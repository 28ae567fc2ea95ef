"""`outrider quantize`: a model's folder in int8, int4 or FP8, with what that costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider import checks
from outrider.errors import InvalidParameter
from outrider.options import AsJson, Threads, set_threads
from outrider.terminal import PlainConsole

if TYPE_CHECKING:
    from outrider.quantize.folder import Written

__all__ = ["quantize"]

_LONGEST = 512  # tokens of a text that are read together
_MOST_OF_LOSS = 16384
_METHODS = ("rtn", "gptq")
_errors = PlainConsole(stderr=True)


def quantize(
    out: Annotated[Path, typer.Option(help="A new folder.")],
    model: Annotated[str | None, typer.Argument(help="Model directory or hub id. Default: the bundled model.")] = None,
    to: Annotated[str, typer.Option(help="int8 (W8A8), int4 (W4A16 in groups) or fp8.")] = "int4",
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale in int4. Default: 128, 64 or 32, what divides.")] = 0,
    method: Annotated[
        str | None, typer.Option(help="rtn (round to nearest) or gptq. Default: gptq with --calibrate, else rtn.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Text (or JSONL of texts) like what the model will read, for gptq.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=2, help="Tokens read of it.")] = 16384,
    text: Annotated[Path | None, typer.Option(help="Held-out text (or JSONL) for the loss. Default: bundled code.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a model as a compressed-tensors checkpoint, which other engines load too, and measure its loss before and after."""
    chosen = checks.choice("method", method or ("rtn" if calibrate is None else "gptq"), _METHODS)
    if (chosen == "gptq") != (calibrate is not None):
        raise InvalidParameter(
            "calibrate", "gptq needs a text: --calibrate FILE" if chosen == "gptq" else f"{chosen} reads no text"
        )
    set_threads(threads)
    from outrider.model import locate
    from outrider.model.bundled import bundled_model
    from outrider.quantize.folder import quantise_folder
    from outrider.quantize.loss import encoded, read_texts
    from outrider.quantize.scheme import Scheme

    scheme, source = Scheme(to, group_size), bundled_model() if model is None else locate(model)
    texts = encoded(source, read_texts(text), _LONGEST, _MOST_OF_LOSS)
    calibration = [] if calibrate is None else encoded(source, read_texts(calibrate), _LONGEST, calibration_tokens)
    for name, pieces in (("text", texts), *((("calibrate", calibration),) if calibrate else ())):
        if not pieces:
            raise InvalidParameter(name, "holds no two tokens")
    written = quantise_folder(source, out, scheme, calibration)
    report = _report(written, out, _losses(source, out, texts))
    print(json.dumps(report)) if as_json else _show(report)


def _losses(source: Path, out: Path, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    from outrider.quantize.loss import mean_loss

    with _errors.status("measuring the loss before"):
        before = mean_loss(source, texts)
    with _errors.status("measuring the loss after"):
        return before, mean_loss(out, texts)


def _report(written: Written, out: Path, losses: tuple[float, float]) -> dict[str, Any]:
    before, after = losses
    return {
        "out": str(out), "to": written.scheme.name, "group_size": written.scheme.group_size, "bytes": written.bytes,
        "bytes_before": written.stored_bytes, "matrices": written.matrices, "by_gptq": written.corrected,
        "loss_before": round(before, 5), "loss_after": round(after, 5), "change": round(after / before - 1, 6),
    }  # fmt: skip


def _show(report: dict[str, Any]) -> None:
    groups = f" in groups of {report['group_size']}" if report["group_size"] else ""
    megabytes = f"{report['bytes'] / 1e6:,.1f} MB ({report['bytes_before'] / 1e6:,.1f} MB before)"
    print(f"{report['out']}: {report['to']}{groups}, {megabytes}")
    print(f"{report['matrices']} matrices, {report['by_gptq']} of them corrected by GPTQ")
    print(f"loss {report['loss_before']:.4f} before, {report['loss_after']:.4f} after ({report['change']:+.2%})")
