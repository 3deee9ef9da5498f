"""The C++ targets: the command to run one, and the coverage of its decoders by a corpus."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from verify.fuzz.coverage import Coverage

ROOT: Final = Path(__file__).parents[2]
_BUILD: Final = Path(os.environ.get("KVXFER_FUZZ_BUILD", ROOT / "build/fuzz"))
SOURCES: Final = ROOT / "engine_native/src"

DECODERS: Final[dict[str, dict[str, str]]] = {
    "handshake": {"bootstrap/handshake.cpp": "", "bootstrap/bytes.hpp": ""},
    "bootstrap": {
        "bootstrap/acceptor.cpp": "Acceptor::Inbound::",
        "bootstrap/dialer.cpp": "::(on_input|on_stream_lost|end)",
        "bootstrap/stream.cpp": "::(on_events|receive|release)",
    },
    "control": {
        "group/peer.cpp": "Peer::(on_input|handle_frame|confirm_paths|come_up|on_stream_lost)",
        "fabric/nic/nic_link.cpp": "NicLink::(on_path|on_frame|on_revoke|settle|answer_revokes)",
        "fabric/nic/remote_regions.cpp": "RemoteRegions::(on_|give|forget)",
        "fabric/nic/nic_path.cpp": "add_credit",
    },
    "tcp_lane": {
        "fabric/tcp/receiver.cpp": "",
        "fabric/tcp/sender.cpp": "Sender::(on_ack|acknowledge)",
        "placement.cpp": "",
    },
    "tcp_lane_gpu": {
        "fabric/tcp/receiver.cpp": "Receiver::(take_slot|finish_batch|end)",
        "fabric/tcp/sender.cpp": "Sender::(stage|staged)",
    },
    "local_path": {
        "fabric/local/local_path.cpp": "LocalPath::(consume|place|reap|receive_regions)",
        "fabric/local/source_memory.cpp": "SourceMemory::in_region",
        "fabric/local/region_message.hpp": "",
        "fabric/local/unix_socket.cpp": "receive_message",
    },
    "local_path_gpu": {
        "fabric/local/local_path.cpp": "LocalPath::(place|copy_from_host|stage|on_region|answer)",
        "fabric/local/gpu_sources.cpp": "GpuSources::(add|open|tried|probe|remove|close|in_region)",
        "fabric/local/gpu_shares.cpp": "GpuShares::(on_answer|want_probe|refuse)",
        "fabric/local/gpu_probe.cpp": "read_probe",
        "fabric/local/region_message.hpp": "",
    },
    "rendezvous": {
        "fabric/local/rendezvous.cpp": "Rendezvous::(on_|advance|take_descriptors|can_read)",
        "fabric/local/ring.cpp": "(SharedRing::map|sealed)",
    },
    "descriptors": {
        "types.cpp": "",
        "paged_write.cpp": "",
        "fabric/verbs/path_endpoint.cpp": "",
        "fabric/ofi/path_endpoint.hpp": "",
    },
}
"""The sources that each target must cover, each with a pattern for the names of functions; an empty
pattern stands for all."""

_ENVIRONMENT: Final = {
    "CUDA_DOUBLE_DELAY_US": "0",
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:handle_abort=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def command(target: str, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command that runs a target under libFuzzer, and its environment."""
    environment = {**os.environ, **_ENVIRONMENT, "LLVM_PROFILE_FILE": os.devnull}
    return [str(_BUILD / f"engine_native/fuzz/fuzz_{target}"), *options], environment


def coverage(target: str, corpora: Sequence[Path], scratch: Path) -> Coverage:
    """Returns the lines of the target's decoders that the inputs reach. Raises CalledProcessError
    if an input fails."""
    run, environment = command(target, ["-runs=0", *map(str, corpora)])
    raw, merged = scratch / f"{target}.profraw", scratch / f"{target}.profdata"
    environment["LLVM_PROFILE_FILE"] = str(raw)
    subprocess.run(run, env=environment, check=True, capture_output=True)
    _llvm("profdata", "merge", "-sparse", str(raw), "-o", str(merged))
    options = [f"-instr-profile={merged}", run[0]]
    counts = _lines(_llvm("cov", "export", "-format=lcov", *options))
    ranges = _functions(_llvm("cov", "export", *options))
    reached = Coverage()
    for name, pattern in DECODERS[target].items():
        path = str(SOURCES / name)
        of_file = counts.get(path, {})
        if not pattern:
            wanted = set(of_file)
        else:
            wanted = {
                line
                for function, first, last in ranges.get(path, [])
                if re.search(pattern, function)
                for line in range(first, last + 1)
                if line in of_file
            }
        reached.add(f"engine_native/src/{name}", {line: of_file[line] > 0 for line in wanted})
    return reached


def _llvm(tool: str, *arguments: str) -> str:
    return subprocess.run(
        [f"llvm-{tool}-14", *arguments], check=True, capture_output=True, text=True
    ).stdout


def _lines(lcov: str) -> dict[str, dict[int, int]]:
    """Returns the number of runs of each line, by file. ccache makes paths relative to the build,
    so one file may have several."""
    counts: dict[str, dict[int, int]] = {}
    for line in lcov.splitlines():
        kind, _, value = line.partition(":")
        if kind == "SF":
            of_file = counts.setdefault(os.path.normpath(value), {})
        elif kind == "DA":
            number, count = value.split(",")[:2]
            of_file[int(number)] = max(of_file.get(int(number), 0), int(count))
    return counts


def _functions(exported: str) -> dict[str, list[tuple[str, int, int]]]:
    """Returns the functions of each file: name, first and last line."""
    functions = json.loads(exported)["data"][0]["functions"]
    mangled = [function["name"].rpartition(":")[2] for function in functions]
    names = subprocess.run(
        ["llvm-cxxfilt-14"], input="\n".join(mangled), check=True, capture_output=True, text=True
    ).stdout.splitlines()
    found: dict[str, list[tuple[str, int, int]]] = {}
    for name, function in zip(names, functions, strict=True):
        lines = [region[at] for region in function["regions"] for at in (0, 2)]
        path = os.path.normpath(function["filenames"][0])
        found.setdefault(path, []).append((name, min(lines), max(lines)))
    return found
