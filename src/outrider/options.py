"""Options that several commands share, and how their values are read. Nothing heavy is imported here."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from outrider.checks import shown
from outrider.errors import InvalidParameter
from outrider.terminal import print_error

__all__ = [
    "AsJson", "Corpus", "Dtype", "LoadFormat", "MaxTokens", "Model", "ModelFirst", "Threads", "add_moved", "check_threads",
    "json_object", "numbers", "set_threads", "spread", "with_parameters",
]  # fmt: skip

_THREADS_OF_A_CORE = 4  # the most that is accepted
Number = TypeVar("Number", int, float)
_WITHOUT_EFFECT = (  # switches of vLLM: what they ask for is so here, or there is nothing of the kind
    "--enforce-eager", "--use-v2-block-manager", "--disable-log-stats", "--disable-log-requests", "--no-enable-log-requests",
    "--trust-remote-code", "--enable-chunked-prefill", "--enable-prefix-caching", "--enable-auto-tool-choice",
)  # fmt: skip

Model = Annotated[str | None, typer.Option(help="Model directory or hub id. Default: the bundled model.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), bfloat16, float32; int8, int4 or (on a GPU) fp8, quantised at load.")]
LoadFormat = Annotated[str, typer.Option(help="safetensors, or dummy for random weights from config.json alone.")]
Corpus = Annotated[
    list[str] | None,
    typer.Option(help="Text files, folders or .jsonl files that lookup drafters search; comma-separated or repeated."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class ModelFirst(TyperCommand):
    """A command whose first argument, the model, may be passed as --model too, as other engines have it.

    Options may be written with underscores, as vLLM allows. Switches of vLLM that change nothing here are left out.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        args = [*(word for word in map(_hyphenated, args[:end]) if word not in _WITHOUT_EFFECT), *args[end:]]
        for place, word in enumerate(args):
            name, is_joined, value = word.partition("=")
            if word == "--":
                break
            if name == "--model":
                if not is_joined and place + 1 == len(args):
                    raise InvalidParameter("--model", "needs a model directory or hub id after it")
                after = place + (1 if is_joined else 2)
                args = [*args[:place], *args[after:], value if is_joined else args[place + 1]]
                break
        return super().parse_args(ctx, args)


def _hyphenated(word: str) -> str:
    name, joined, value = word.partition("=")
    return name.replace("_", "-") + joined + value if name.startswith("--") else word


def spread(work: Callable[..., None]) -> Callable[..., None]:
    """A Typer command from a function whose parameter `flags` is a dataclass: an option for each of its fields."""
    flags_type = get_type_hints(work)["flags"]
    options = inspect.signature(flags_type, eval_str=True).parameters
    others = {name: value for name, value in inspect.signature(work, eval_str=True).parameters.items() if name != "flags"}

    def command(**values: Any) -> None:
        work(**{name: values.pop(name) for name in others}, flags=flags_type(**values))

    return with_parameters(command, work, [*options.values(), *others.values()])


def with_parameters(
    command: Callable[..., None], work: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """A command that Typer takes for a function with these parameters, and with the name and the help text of `work`."""
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    command.__name__, command.__doc__ = work.__name__, work.__doc__
    return command


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Numbers separated by commas."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(option, f"must be numbers separated by commas, got {text!r}") from None


def json_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise InvalidParameter(option, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidParameter(option, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidParameter(option, f"must be a JSON object, got {shown(text)}")
    return value


def set_threads(threads: int | None) -> None:
    """Limit the CPU threads of torch and of the native core."""
    if threads is not None:
        check_threads(threads)
        import torch

        torch.set_num_threads(threads)


def check_threads(threads: int) -> None:
    """Refuse so many threads that a forward would take minutes: threads wait for each other, and most would not be running."""
    cores = os.cpu_count() or 1
    if threads > _THREADS_OF_A_CORE * cores:
        reason = f"must be at most {_THREADS_OF_A_CORE * cores}, got {threads}: this machine runs {cores} threads at once"
        raise InvalidParameter("--threads", reason)


def add_moved(app: typer.Typer, name: str, command: str) -> None:
    """Register the old name of a command that left the package: it names the command that replaces it, and exits with 2."""

    def moved() -> None:
        print_error(f"{name} has moved out of the package: run `python -m {command}` in a checkout of the repository")
        raise typer.Exit(2)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, hidden=True, context_settings=anything)(moved)
