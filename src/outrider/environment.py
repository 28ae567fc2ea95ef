"""The OUTRIDER_* variables: which are settings, which come from Kubernetes, and which are mistyped."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, MutableMapping
from difflib import get_close_matches
from typing import Any

__all__ = ["OTHER_VARIABLES", "known_variables", "tidy"]

_log = logging.getLogger("outrider")
_PREFIX = "OUTRIDER_"
OTHER_VARIABLES = (  # read outside of the command line
    "OUTRIDER_CACHE",  # folder of measured costs and corpora
    "OUTRIDER_CORE",  # native library to load
    "OUTRIDER_OPS",  # native or torch
)
# For a service called "outrider", or "outrider-" and something, every pod of its namespace gets these.
_KUBERNETES = re.compile(r"OUTRIDER(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S*", re.IGNORECASE)


def known_variables(command: Any) -> set[str]:
    """Every variable that the program reads: those of the flags of a command and its subcommands, and a few others."""
    return {*OTHER_VARIABLES, *_of_flags(command)}


def tidy(environment: MutableMapping[str, str], known: Iterable[str]) -> None:
    """Remove service addresses that Kubernetes set in place of settings. Warn of those and of unknown names."""
    names = set(known)
    for name in [variable for variable in environment if variable.startswith(_PREFIX)]:
        if name in names:
            if _SERVICE_URL.fullmatch(environment[name].strip()):
                url = environment.pop(name)
                _log.warning(
                    "%s=%s is ignored: Kubernetes sets it for a service of that name. Set enableServiceLinks: false in the pod, "
                    "or pass the flag --%s",
                    name, url, name.removeprefix(_PREFIX).lower().replace("_", "-"),
                )  # fmt: skip
        elif not _KUBERNETES.fullmatch(name):
            near = get_close_matches(name.removeprefix(_PREFIX), [variable.removeprefix(_PREFIX) for variable in names], 1)
            hint = f"did you mean {_PREFIX}{near[0]}?" if near else f"known are {', '.join(sorted(names))}"
            _log.warning("%s is set, but nothing reads it; %s", name, hint)


def _of_flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        names = parameter.envvar or ()
        yield from [names] if isinstance(names, str) else names
    for below in getattr(command, "commands", {}).values():
        yield from _of_flags(below)
