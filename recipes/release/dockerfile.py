"""The steps of the Dockerfile, run in order where docker is absent.

Each stage gets a folder in place of its file system and a virtual environment in place of the image of Python. COPY copies, RUN
runs in a shell with the folder's paths, and what only a system's package manager or user database can do is skipped and said.
Then the entry point is started, the health check must pass, a request must be answered, and SIGTERM must end the server.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Instruction", "Stage", "read_dockerfile", "run_steps", "stages_for"]

_OF_THE_SYSTEM = ("apt-get ", "useradd ", "install -d -o ", "rm -rf /var/lib/apt")
_START_S = 180.0
_KEY = "key-of-this-run"


class Instruction(NamedTuple):
    """One instruction, such as RUN and its command."""

    name: str
    text: str


@dataclass(slots=True)
class Stage:
    """What stands under one FROM."""

    name: str
    base: str
    steps: list[Instruction] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        """The stages that it copies from."""
        return [match[1] for step in self.steps if step.name == "COPY" and (match := re.match(r"--from=(\S+)", step.text))]

    def last(self, name: str) -> str:
        return next(step.text for step in reversed(self.steps) if step.name == name)


def read_dockerfile(path: Path) -> list[Stage]:
    """The stages of a Dockerfile. Arguments before the first FROM are left out: they name images."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            stages.append(Stage(stage, base))
        elif name and stages:
            stages[-1].steps.append(Instruction(name, rest))
    return stages


def stages_for(stages: list[Stage], target: str) -> list[Stage]:
    """The stages that a target needs, in order, itself last."""
    by_name = {stage.name: stage for stage in stages}
    needed = [target]
    for name in needed:
        needed += [source for source in by_name[name].sources if source not in needed]
    return [stage for stage in stages if stage.name in needed]


def run_steps(dockerfile: Path, target: str, arguments: Mapping[str, str]) -> None:
    """Run the steps of a target, then serve a request from what they made."""
    with tempfile.TemporaryDirectory() as folder:
        built: dict[str, _Built] = {}
        for stage in stages_for(read_dockerfile(dockerfile), target):
            built[stage.name] = _Built(stage, Path(folder) / stage.name)
            for step in stage.steps:
                built[stage.name].take(step, built, arguments)
        _serve(built[target])


class _Built:
    """A stage that is being built: its folder, its variables, and where it works."""

    def __init__(self, stage: Stage, root: Path) -> None:
        self.stage, self.root, self.folder = stage, root, root
        self.venv = root / "usr"
        root.mkdir()
        print(f"FROM {stage.base} AS {stage.name}: {self.venv}", flush=True)
        venv.create(self.venv, with_pip=any(step.text.startswith("pip ") for step in stage.steps))
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name in ("HOME", "LANG")}
        self.environment = kept | {"PATH": f"{self.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
        copied = [step.text.split()[-1] for step in stage.steps if step.name == "COPY"]
        made = [step.text for step in stage.steps if step.name in ("WORKDIR", "VOLUME")]
        self._paths = {Path(path).parts[1] for path in (*copied, *made) if path.startswith("/")} | {
            match for step in stage.steps if step.name == "RUN" for match in re.findall(r"--wheel-dir /(\w+)", step.text)
        }

    def take(self, step: Instruction, built: Mapping[str, _Built], arguments: Mapping[str, str]) -> None:
        """Do one step, or say that it is skipped."""
        if step.name == "ARG":
            name, _, default = step.text.partition("=")
            self.environment[name] = arguments.get(name, default)
        elif step.name == "ENV":
            self.environment |= {
                name: self.here(value) for name, _, value in (word.partition("=") for word in shlex.split(step.text))
            }
        elif step.name == "WORKDIR":
            self.folder = Path(self.here(step.text))
            self.folder.mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            self._copy(step.text.split(), built)
        elif step.name == "RUN":
            self._run(step.text)
        else:
            print(f"     {step.name} {step.text[:100]}")

    def here(self, text: str) -> str:
        """A text with the stage's absolute paths inside its folder."""
        return re.sub(rf"(?<![\w.$/}}])/({'|'.join(sorted(self._paths)) or '$^'})\b", rf"{self.root}/\1", text)

    def _copy(self, words: list[str], built: Mapping[str, _Built]) -> None:
        source = Path.cwd()
        if words[0].startswith("--from="):
            source = built[words.pop(0).removeprefix("--from=")].root
        *names, to = words
        target = Path(self.here(to)) if to.startswith("/") else self.folder / to
        print(f"COPY {' '.join(names)} -> {target}", flush=True)
        for name in names:
            path = source / name.lstrip("/")
            if path.is_dir():
                shutil.copytree(
                    path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
                )
            else:
                into = target / path.name if to.endswith("/") else target
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)

    def _run(self, command: str) -> None:
        parts = [part.strip() for part in command.split("&&")]
        for skipped in (part for part in parts if part.startswith(_OF_THE_SYSTEM)):
            print(f"skip {skipped}")
        rest = self.here(" && ".join(part for part in parts if not part.startswith(_OF_THE_SYSTEM)))
        if rest:
            began = time.monotonic()
            print(f"RUN  {rest}", flush=True)
            subprocess.run(["sh", "-ec", rest], cwd=self.folder, env=self.environment, check=True)
            print(f"     {time.monotonic() - began:.0f} s", flush=True)


def _serve(built: _Built) -> None:
    """Start the entry point as the image would, and use it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = built.environment | {"OUTRIDER_PORT": str(port), "OUTRIDER_API_KEY": _KEY}
    command = [*json.loads(built.stage.last("ENTRYPOINT")), *json.loads(built.stage.last("CMD"))]
    print(f"{' '.join(command)} on port {port}", flush=True)
    server = subprocess.Popen([built.venv / "bin" / command[0], *command[1:]], env=environment, cwd=built.root)
    try:
        check = json.loads(built.stage.last("HEALTHCHECK").partition("CMD ")[2])
        deadline = time.monotonic() + _START_S
        while subprocess.run(check, env=environment, cwd=built.root, stderr=subprocess.DEVNULL, check=False).returncode:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the health check did not pass"
            time.sleep(1)
        body = json.dumps({"prompt": "def f(x):", "max_tokens": 8}).encode()
        headers = {"Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            print("answered:", json.loads(answer.read())["choices"][0]["text"].strip())
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, "it did not end with 0"
        print("healthy, answered, drained")
    finally:
        server.kill()
        server.wait()
