from __future__ import annotations

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native


def test_transfers_without_a_control_plane() -> None:
    assert run_example("kv_transfer.py") == [
        "  1 tokens: 32768 bytes, all as computed",
        " 16 tokens: 32768 bytes, all as computed",
        "100 tokens: 229376 bytes, all as computed",
        "333 tokens: 688128 bytes, all as computed",
        "prefill is killed: peer-lost, 64 blocks are free",
    ]


def test_transfers_in_a_fleet_to_two_ranks() -> None:
    assert run_example("kv_fleet.py") == [
        "  1 tokens: [16384, 16384] bytes on the two ranks, all as computed",
        " 16 tokens: [16384, 16384] bytes on the two ranks, all as computed",
        "100 tokens: [114688, 114688] bytes on the two ranks, all as computed",
        "333 tokens: [344064, 344064] bytes on the two ranks, all as computed",
        "prefill ends: 0",
    ]
