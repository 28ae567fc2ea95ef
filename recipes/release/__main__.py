"""`python -m recipes.release wheel | check | dockerfile | arm`, from the root of a checkout."""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.release.arm import run_on_arm
from recipes.release.check import check_wheel
from recipes.release.dockerfile import run_steps
from recipes.release.wheel import build_wheel


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    wheel = commands.add_parser("wheel", help="build the sdist and the wheel")
    wheel.add_argument("--out", type=Path, default=Path("dist"))
    check = commands.add_parser("check", help="install the wheel where there is no compiler, and run it")
    check.add_argument("--wheel", type=Path, help="default: the newest in dist")
    steps = commands.add_parser("dockerfile", help="run the steps of the Dockerfile in order, without docker")
    steps.add_argument("--target", default="cpu")
    steps.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    arm = commands.add_parser("arm", help="cross-build the native core for ARM, and run its tests under qemu-user")
    arm.add_argument("tests", nargs="*", help="default: the tests of the native core")
    flags = parser.parse_args()
    if flags.command == "wheel":
        print(build_wheel(flags.out))
    elif flags.command == "check":
        check_wheel(flags.wheel or max(Path("dist").glob("*.whl"), key=lambda path: path.stat().st_mtime))
    elif flags.command == "arm":
        run_on_arm(Path("build/arm"), flags.tests)
    else:
        run_steps(Path("Dockerfile"), flags.target, dict(argument.split("=", 1) for argument in flags.build_arg))


main()
