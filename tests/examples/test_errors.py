from __future__ import annotations

import re

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native

SAID = {
    "an unknown option": r"invalid-argument: .*'fabric'; did you mean 'fabrics'\?",
    "a short cluster key": "invalid-argument: cluster_key has 5 bytes",
    "a port of another server": "connect-failed: connecting to kvx://",
    "nothing listens there": "connect-failed: .*refused",
    "another cluster key": "authentication-failed: .*cluster_key",
    "memory that is not registered": "invalid-argument: src is array",
    "beyond the region": "out-of-bounds: .*9000 bytes",
    "a negative offset": "out-of-bounds: dst_offset is -1",
    "a length that is not an int": r"invalid-argument: length is 4096\.0",
    "a page that does not exist": "out-of-bounds: source page 2 .*valid pages are 0 to 1",
    "text for bytes": "invalid-argument: data is 'hi'",
    "a grant without imm=": r"invalid-argument: .*grant .*imm=\d+; this one has none",
    "a wait for too few": "protocol-error: .*2 immediates, but 1 were waited for; wait for the sum",
    "a wait for too many": "deadline-exceeded: .*2 of 3 immediates",
    "a released counter": "stale-counter: .*was released",
    "memory that was closed": "unknown-region: the source region",
    "a peer that has left": "peer-lost: peer 'b'",
    "a closed engine": "engine-closed: this engine was closed",
}


def test_each_wrong_use_is_reported_in_one_line() -> None:
    lines = run_example("errors.py")
    told = dict(zip(lines[::2], lines[1::2], strict=True))
    assert told.keys() == SAID.keys()
    for what, says in SAID.items():
        assert re.fullmatch(rf"    {says}.*", told[what]), told[what]
