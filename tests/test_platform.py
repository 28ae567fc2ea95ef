"""The AMX trap is detected and avoided before torch runs a product."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cores import NEEDED
from outrider.platform import amx_state, arm_flags, cpu_flags, cpuid, memory_bytes

AMX = frozenset({"amx_tile", "amx_bf16", "avx512f", "hypervisor"})
PALETTE = (0x04002000, 0x00080040, 0x10, 0)


@pytest.mark.parametrize(
    ("flags", "leaf", "state"),
    [
        (frozenset({"avx2"}), None, "absent"),
        (AMX, (0, 0, 0, 0), "hidden"),
        (AMX, PALETTE, "usable"),
        (AMX, None, "hidden"),
        (AMX - {"hypervisor"}, None, "usable"),
    ],
)
def test_states(flags: frozenset[str], leaf: tuple[int, int, int, int] | None, state: str) -> None:
    assert amx_state(flags, leaf) == state


@pytest.mark.skipif("fpu" not in cpu_flags(), reason="CPUID exists on x86 only")
def test_cpuid_reads_the_vendor() -> None:
    leaf = cpuid(0)
    if leaf is None:
        pytest.skip("this kernel forbids executable pages")
    vendor = b"".join(word.to_bytes(4, "little") for word in (leaf[1], leaf[3], leaf[2]))
    assert vendor in Path("/proc/cpuinfo").read_bytes()


# A trapped processor in a fresh process: what the kernel and CPUID say is replaced before the package decides.
TRAPPED = """
import sys, types
{first}
import importlib.util, os
spec = importlib.util.spec_from_file_location("outrider.platform", {path!r})
platform = importlib.util.module_from_spec(spec)
sys.modules["outrider.platform"] = platform
spec.loader.exec_module(platform)
platform.cpu_flags = lambda: frozenset({{"amx_tile", "hypervisor"}})
platform.cpuid = lambda leaf, subleaf=0: (0, 0, 0, 0)
{extra}
import outrider
import torch
x = torch.ones(16, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(x, x)
print(os.environ.get("ONEDNN_MAX_CPU_ISA"), platform.guard().bf16_products)
"""


def trapped(first: str = "", extra: str = "", **env: str) -> str:
    path = str(Path(__file__).parents[1] / "src" / "outrider" / "platform.py")
    code = TRAPPED.format(first=first, path=path, extra=extra)
    clean = {k: v for k, v in os.environ.items() if "ISA" not in k}
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_variable_is_set_before_torch() -> None:
    assert trapped() == "AVX512_CORE_FP16 True"


def test_also_when_torch_came_first() -> None:
    assert trapped(first="import torch") == "AVX512_CORE_FP16 True"


def test_products_are_widened_when_it_is_too_late() -> None:
    """A child that dies of the instruction means: no bf16 products in this process."""
    die = "platform._probe = lambda: os.kill(os.getpid(), 4)"
    assert trapped(first="import torch", extra=die) == "AVX512_CORE_FP16 False"


def test_a_users_setting_is_respected() -> None:
    assert trapped(ONEDNN_MAX_CPU_ISA="AVX2") == "AVX2 True"


@pytest.mark.parametrize(
    ("membership", "limits", "share"),
    [
        ("0::/\n", {"memory.max": "1048576"}, 2**20),
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "4096", "a/b/memory.max": "8192"}, 4096),
        ("3:cpu:/a\n2:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4096", "cpu/a/memory.limit_in_bytes": "1"}, 4096),
        ("0::/gone\n", {"memory.max": "max"}, None),
        ("2:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_memory_is_what_a_container_may_take(tmp_path: Path, membership: str, limits: dict[str, str], share: int | None) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        (tmp_path / "cgroups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroups" / name).write_text(text + "\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(tmp_path / "cgroups", tmp_path / "membership") == (share or machine)


@pytest.mark.parametrize(
    ("entries", "builds"),
    [
        ({16: 0, 26: 0}, []),  # Cortex-A72
        ({16: 0x119FFB, 26: 0}, ["neon"]),  # Neoverse N1, Cortex-A76
        ({16: 0x119FFB, 26: 1 << 13}, ["neon"]),
        ({16: 0x119FFB, 26: 3 << 13}, ["neonbf16", "neon"]),  # Neoverse V1, N2
    ],
)
def test_builds_for_arm_processors(entries: dict[int, int], builds: list[str]) -> None:
    flags = arm_flags(entries.__getitem__)
    assert [name for name, needed in NEEDED.items() if needed <= flags] == builds
