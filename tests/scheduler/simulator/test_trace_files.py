"""Public traces: read as they are published; invalid ones are refused by line."""

from __future__ import annotations

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.scheduler.simulator.trace_files import read_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48,879,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
"""


def read(tmp_path, text):
    file = tmp_path / "trace"
    file.write_text(text)
    return read_requests(file)


def test_azure_with_lines_in_any_order(tmp_path):
    trace = read(tmp_path, AZURE)
    (arrivals,) = trace.between(0, trace.seconds)
    assert arrivals.at.tolist() == pytest.approx([0, 1.31941, 4.314579], abs=1e-5)
    assert arrivals.prompt.tolist() == [374, 879, 396]
    assert arrivals.output.tolist() == [44, 1, 109]
    assert (trace.tokens_per_hash, arrivals.hashes, trace.seconds) == (None, None, 5)


def test_azure_of_2024_names_its_time_zone(tmp_path):
    header, _, _ = AZURE.partition("\n")
    trace = read(
        tmp_path, f"{header}\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:01:00,1,1\n"
    )
    (arrivals,) = trace.between(0, trace.seconds)
    assert arrivals.at.tolist() == pytest.approx([0, 59.99007], abs=1e-5)


def test_mooncake_with_its_prefixes(tmp_path):
    trace = read(tmp_path, MOONCAKE)
    (arrivals,) = trace.between(0, trace.seconds)
    assert arrivals.at.tolist() == [0, 1.5]
    assert arrivals.hashes == ((0, 1, 2), (0, 9))
    assert trace.tokens_per_hash == 512


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: the columns are ''"),
        ("time,in,out\n1,2,3\n", "line 1: the columns are 'time,in,out'; give a CSV of Azure's"),
        (AZURE + "yesterday,1,2\n", "line 5: TIMESTAMP is 'yesterday'; write it as"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 5: 2 values; write 3"),
        (AZURE + "2023-11-16 18:15:46,-1,2\n", "line 5: ContextTokens is '-1'; write 0 to"),
        (AZURE + "2023-11-16 18:15:46,1,many\n", "line 5: GeneratedTokens is 'many'"),
        (AZURE.partition("\n")[0], "has no request"),
        (MOONCAKE + "{\n", "line 3: no JSON"),
        (MOONCAKE + "7\n", "line 3: timestamp is missing"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: output_length is missing"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}\n', "timestamp is -1; write"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}\n', "input_length is 1.5"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-4]}\n',
            "hash_ids is '[-4]'; write a list of numbers",
        ),
    ],
)
def test_an_invalid_trace_is_refused_by_its_line(tmp_path, text, words):
    with pytest.raises(InvalidArgument) as refused:
        read(tmp_path, text)
    assert words in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"cannot be read .*; give a CSV"):
        read_requests(tmp_path / "nowhere.csv")
