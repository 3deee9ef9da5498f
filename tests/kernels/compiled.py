"""Compiles the kernels for a GPU that need not be present: `python -m tests.kernels.compiled 90`.

Prints, for each kernel, the accesses to global memory of its PTX.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvxfer.kernels.checksum import checksum_kernel
from kvxfer.kernels.paged_attention import paged_attention_kernel
from kvxfer.kernels.runs import copy_runs_kernel
from kvxfer.kernels.store_tokens import store_tokens_kernel


def accesses(kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int) -> list[str]:
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i64")
        for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert done.asm["cubin"], "no machine code"
    return sorted(set(re.findall(r"(?:ld|st)\.global[.\w:]*|cp\.async\.c[ag]", done.asm["ptx"])))


def main(arch: int) -> dict[str, list[str]]:
    bytes_to_bytes = {
        "source": "*u8",
        "target": "*u8",
        "source_ids": "*i32",
        "target_ids": "*i32",
        "of_cycle": "*i64",
    }
    wide = {"word_bytes": 8, "word_type": tl.uint64, "unit": 2}
    words = {"memory": "*u8", "constants": "*u64", "sums_out": "*u64"}
    words |= {"places": "*i64", "numbers": "*i64"}
    found = {}
    for kind in ("fp32", "bf16"):
        planes = dict.fromkeys(("keys", "values"), f"*{kind}")
        size = {"head_size": 128, "width": 128}
        asked = dict.fromkeys(("queries", "attended"), f"*{kind}")
        numbers = {"table": "*i64", "scale": "fp32"}
        for rows in (16, 64):
            tile = {"group": 4, "rows": rows, "tokens": 32 if kind == "fp32" else 64}
            found[f"attention {kind} {rows}"] = accesses(
                paged_attention_kernel, planes | asked | numbers, size | tile, arch
            )
        new = dict.fromkeys(("new_keys", "new_values"), f"*{kind}") | {"slots": "*i64"}
        found[f"store {kind}"] = accesses(
            store_tokens_kernel, planes | new, {**size, "tokens": 16}, arch
        )
    return found | {
        "pages": accesses(
            copy_runs_kernel, bytes_to_bytes, {**wide, "runs_at_once": 1, "at_once": 2048}, arch
        ),
        "vectors": accesses(
            copy_runs_kernel, bytes_to_bytes, {**wide, "runs_at_once": 64, "at_once": 32}, arch
        ),
        "checksum": accesses(checksum_kernel, words, {"runs_at_once": 32}, arch),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
