"""Plants defects in the engine, one at a time, and checks that the tests of GPU memory catch each.

`make test SUITE=gpu` calls it on hosts without a GPU, with a double of CUDA's driver. Each defect
is built into a copy of the sources below build/defects. It is caught if the C++ suite "cuda" fails
or does not end.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parents[2]
WORK: Final = ROOT / "build/defects"

_SECONDS: Final = 150  # the whole suite takes a tenth of this
_CASE: Final = re.compile(r"^TEST CASE: +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Defect:
    """A defect: its description, and the text `there` that it replaces in a file of the engine."""

    name: str
    file: str
    there: str
    instead: str


DEFECTS: Final = (
    Defect(
        "local: counted before the copy has ended",
        "fabric/local/local_path.cpp",
        "      if (!gpu.ended(batch.copied)) break;\n",
        "",
    ),
    Defect(
        "local: closed while other processes have the memory open",
        "fabric/local/gpu_shares.cpp",
        "  return share.by_handle &&",
        "  return share.by_handle && share.number == UINT32_MAX &&",
    ),
    Defect(
        "local: the path ends while the peer's memory is open",
        "fabric/local/gpu_sources.cpp",
        "close(std::move(region.memory), [open = open_] {});",
        "close(std::move(region.memory), [] {});",
    ),
    Defect(
        "local: the engine's thread closes the peer's memory",
        "fabric/local/gpu_sources.cpp",
        "  background.run([last = std::move(memory)]() mutable { last.reset(); },"
        " std::move(then));",
        "  memory.reset();\n  background.run([] {}, std::move(then));",
    ),
    Defect(
        "tcp: counted before the copy has ended",
        "fabric/tcp/receiver.cpp",
        "      if (!gpu.ended(batch.copied)) return;\n",
        "",
    ),
    Defect(
        "staging memory is used again while it is copied",
        "cuda/gpu.cpp",
        "give_back(slot, issued_)",
        "give_back(slot, 0)",
    ),
    Defect(
        "release, fence and close do not wait for copies",
        "cuda/gpus.cpp",
        "  if (until.empty()) return then();",
        "  return then();",
    ),
    Defect(
        "a launch is counted on another stream than its copies'",
        "cuda/gpu.cpp",
        "launch_kernel(count_kernel_, 1, 1, 1, 1, 1, 1, 0, stream_, &of_count,",
        "launch_kernel(count_kernel_, 1, 1, 1, 1, 1, 1, 0, nullptr, &of_count,",
    ),
    Defect(
        "the engine thread launches copies",
        "cuda/gpu.cpp",
        "  calls_.post([this, ticket] { copy_now(ticket); });",
        "  copy_now(ticket);",
    ),
    Defect(
        "the engine's stream may share a hardware queue with one that waits for it",
        "cuda/gpu.cpp",
        "stream_create_with_priority(&stream, kNonBlocking, highest)",
        "stream_create_with_priority(&stream, kNonBlocking, least)",
    ),
    Defect(
        "the engine's kernels are loaded with the first transfer",
        "cuda/gpu.cpp",
        "  copy_now(0);\n",
        "",
    ),
    Defect(
        "an engine that ends waits for all streams",
        "cuda/gpu.cpp",
        "return unused().add(gpu);",
        "return delete gpu;",
    ),
    Defect(
        "a stream's word is used again while it is counted up",
        "cuda/stream_order.cpp",
        "return free.word->value.load(std::memory_order_acquire) == free.last;",
        "return free.word != nullptr;",
    ),
    Defect(
        "a context that is lost while it copies is not noticed",
        "cuda/gpu.cpp",
        '  if (status != kSuccess && status != kNotReady) fail(status, "cuStreamQuery");',
        "",
    ),
    Defect(
        "a GPU's missing features are not detected",
        "cuda/gpu.cpp",
        "  if (attribute(kHostPointers) != 0) return {};",
        "  return {};",
    ),
    Defect(
        "the processor copies to a GPU's address",
        "fabric/local/local_path.cpp",
        "const bool by_gpu = batch.placement.gpu() != nullptr;",
        "const bool by_gpu = false;",
    ),
    Defect(
        "the NIC is given bytes of a GPU inline",
        "fabric/verbs/verbs_path.cpp",
        " && operation.source->host();",
        ";",
    ),
    Defect(
        "no context is current",
        "cuda/gpu.hpp",
        "    pushed_ = driver.ctx_push_current(context);",
        "    pushed_ = context ? kSuccess : kInvalidContext;",
    ),
    Defect(
        "mapped memory is read before that is permitted",
        "cuda/gpu_sharing.cpp",
        "driver_->mem_set_access(base, total, &access, 1)",
        "(void(access), kSuccess)",
    ),
    Defect(
        "memory of another GPU is read although its probe reads wrong",
        "fabric/local/gpu_probe.cpp",
        "  if (std::ranges::equal(*seen, std::as_bytes(std::span(words)))) return {};",
        "  if (seen->size() == kBytes) return {};",
    ),
    Defect(
        "a stream's count runs on another stream",
        "cuda/gpu.cpp",
        "1, 1, 1, 1, 1, 1, 0, stream,",
        "1, 1, 1, 1, 1, 1, 0, stream_,",
    ),
    Defect(
        "a stream's wait is satisfied by the one before it",
        "cuda/stream_order.cpp",
        ">> kCodeBits) + 1;",
        ">> kCodeBits);",
    ),
    Defect(
        "a stream waits for ever when its counter is released",
        "group/stream_waits.cpp",
        '  if (!count) return failed(Errc::stale_counter, "it was released");',
        "  if (!count) return false;",
    ),
    Defect(
        "writes of a NIC count before they are flushed",
        "cuda/gpus.cpp",
        "  if (!flushing_.load(std::memory_order_acquire)) return then();\n",
        "  return then();\n",
    ),
    Defect(
        "writes of a NIC are not flushed before a fence has ended",
        "fabric/nic/nic_path.cpp",
        "  receive_context_.gpus.after_flush(std::move(then));",
        "  then();",
    ),
    Defect(
        "a flush that has begun stands for writes after it",
        "cuda/gpu.cpp",
        "  if (flushes_ > flushes_begun_) return flushes_;",
        "  if (flushes_ > flushes_ended_) return flushes_;",
    ),
    Defect(
        "a NIC is used although nothing that it writes arrives",
        "fabric/nic/gpu_ways.cpp",
        "  if (std::memcmp(seen.data(), bytes, kBytes) != 0) {",
        "  if (false) {",
    ),
    Defect(
        "a GPU that is lost goes on sending",
        "fabric/local/local_path.cpp",
        "    if (range.first == 0 && !asked_if_alive(*operation)) return 0;\n",
        "",
    ),
    Defect(
        "a dmabuf is registered at another address than its memory's",
        "fabric/ofi/open_domain.cpp",
        "(memory.address - offset)",
        "(memory.address)",
    ),
    Defect(
        "libfabric may copy memory of GPUs by calls of CUDA",
        "fabric/ofi/endpoint.cpp",
        "  const bool permitted = false;",
        "  const bool permitted = true;",
    ),
    Defect(
        "a window is opened in a dmabuf",
        "fabric/verbs/verbs_registration.hpp",
        "return way_ != MemoryWay::dmabuf;",
        "return true;",
    ),
)


def copy_sources() -> None:
    """Copies the files that have changed since the last run, so that ninja compiles only these."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        [*command, "CMakeLists.txt", "pyproject.toml", "engine_native", "benchmarks/gpu", "verify"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, WORK / name
        if not source.exists():
            continue
        content = source.read_bytes()
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def build() -> None:
    folders = ("-S", WORK, "-B", WORK / "build", "-G", "Ninja")
    options = ("CMAKE_BUILD_TYPE=Release", "KVXFER_PYTHON=OFF", "KVXFER_TESTS=ON")
    defined = [f"-D{option}" for option in (*options, "KVXFER_WERROR=OFF")]
    subprocess.run(["cmake", *folders, *defined], stdout=subprocess.DEVNULL, check=True)
    subprocess.run(["cmake", "--build", WORK / "build", "--", "--quiet"], check=True)


def caught_by(defect: Defect) -> str | None:
    """Returns the test that fails with the defect, or how the suite ended; None if it passes."""
    file = WORK / "engine_native/src" / defect.file
    right = file.read_text()
    if right.count(defect.there) != 1:
        raise SystemExit(f"defects.gpu: {defect.file} must contain once: {defect.there!r}")
    file.write_text(right.replace(defect.there, defect.instead))
    try:
        build()
        tests = WORK / "build/engine_native/tests/kvxfer_tests"
        suite = [tests, "--no-version", "--test-suite=cuda", "--abort-after=1"]
        ended = subprocess.run(
            suite, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_SECONDS} s"
    finally:
        file.write_text(right)
    if ended.returncode == 0:
        return None
    found = _CASE.search(ended.stdout)
    return found[1] if found else f"exit status {ended.returncode}"


def main() -> int:
    console = Console(stderr=True)
    table = Table("defect", "caught by", title="defects of the engine, on the double")
    missed = 0
    copy_sources()
    with console.status("building") as status:
        build()
        for number, defect in enumerate(DEFECTS, 1):
            status.update(f"{number} of {len(DEFECTS)}: {defect.name}")
            found = caught_by(defect)
            missed += found is None
            console.print(f"{number} of {len(DEFECTS)}: {defect.name}: {found or 'MISSED'}")
            table.add_row(defect.name, found or "MISSED")
    Console(width=120).print(table)
    print(f"proved: {len(DEFECTS) - missed} of {len(DEFECTS)} defects are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
