import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvxfer
from kvxfer.cli import app
from kvxfer.errors import InvalidArgument
from tests.topology import machines

pytestmark = pytest.mark.native


def test_json_holds_every_finding_and_the_exit_code_says_whether_the_core_works() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["core_works"] else 1)
    assert {"tcp", "local, shared memory", "native engine"} <= {
        finding["name"] for finding in report["findings"]
    }
    assert all(
        set(finding) == {"area", "name", "status", "detail", "remedy"}
        for finding in report["findings"]
    )


def test_the_table_shows_extras_literally_and_remedies() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert "kvxfer[server]" in result.output
    assert "verbs" in result.output


# --- probe -----------------------------------------------------------------------------------


def test_a_probe_writes_a_report_that_holds_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    secret = "hush" * 8
    result = CliRunner().invoke(
        app,
        ["doctor", "--probe", "--report", str(file)],
        env={"COLUMNS": "200", "KVXFER_CLUSTER_KEY": secret, "SOME_VARIABLE": secret},
    )
    assert (result.exit_code, f"written: {file}" in result.stderr) == (0, True)
    assert "every byte compared" in result.stdout
    text = file.read_text()
    assert secret not in text
    report = json.loads(text)
    assert set(report) == {
        "software",
        "hardware",
        "loopbacks",
        "core_works",
        "findings",
        "topology",
        "groups",
    }
    assert report["software"]["kvxfer"] == kvxfer.__version__
    assert set(report["hardware"]) == {"nics", "iommu", "libraries", "gpus"}
    verdicts = {each["fabric"]: each["verdict"] for each in report["loopbacks"]}
    assert (verdicts["tcp"], verdicts["local"]) == ("ok", "ok")
    assert {finding["area"] for finding in report["findings"]} >= {"hardware", "loopback"}


def test_json_of_a_probe_is_the_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["doctor", "--json", "--report", str(file)])
    assert json.loads(result.stdout) == json.loads(file.read_text())


@pytest.mark.parametrize("file", ["missing/report.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_probe(
    tmp_path: Path, file: str
) -> None:
    result = CliRunner().invoke(app, ["doctor", "--report", str(tmp_path / file)])
    assert isinstance(result.exception, InvalidArgument)
    assert str(result.exception).startswith(f"--report {tmp_path / file}: not a file in a ")
    assert result.stdout == ""


def test_a_recorded_tree_cannot_be_probed(tmp_path: Path) -> None:
    dgx = machines.write("dgx", tmp_path)
    result = CliRunner().invoke(
        app, ["doctor", "--probe", "--sysfs", str(dgx)], env={"COLUMNS": "200"}
    )
    assert (result.exit_code, "cannot be probed" in result.stderr) == (2, True)


# --- topology --------------------------------------------------------------------------------


def test_the_topology_is_drawn_below_the_findings_and_is_in_the_json() -> None:
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert (
        0 < shown.index("locked memory") < shown.index("topology\n") < shown.index("domain groups")
    )
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert set(report) == {"core_works", "findings", "topology", "groups"}
    assert len(report["groups"]) >= 1


@pytest.mark.parametrize("folder", ["dgx", "dgx/sys"])
def test_a_recorded_tree_is_drawn_and_nothing_else_is_checked(tmp_path: Path, folder: str) -> None:
    machines.write("dgx", tmp_path)
    result = CliRunner().invoke(
        app, ["doctor", "--sysfs", str(tmp_path / folder)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "topology"
    assert "├── NUMA node 0  CPUs 0-55,112-167" in lines
    assert lines[-1].split() == ["GPU", "7", "mlx5_7", "PIX", "400", "Gbit/s", "56-111,168-223"]
    assert "native engine" not in result.stdout


def test_a_recorded_tree_as_json_holds_its_topology_and_groups_only(tmp_path: Path) -> None:
    p5en = machines.write("p5en", tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--json", "--sysfs", str(p5en)])
    report = json.loads(result.stdout)
    assert set(report) == {"topology", "groups"}
    assert [len(report["topology"][part]) for part in ("numa_nodes", "gpus", "nics")] == [2, 8, 16]
    assert report["groups"][7]["nics"] == ["rdmap162s0", "rdmap163s0"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_folder_without_a_sysfs_is_a_usage_error(tmp_path: Path, options: list[str]) -> None:
    result = CliRunner().invoke(
        app, ["doctor", *options, "--sysfs", str(tmp_path / "no")], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert (result.stdout, "holds no sysfs" in result.stderr) == ("", True)


def test_the_version_is_shown():
    shown = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == f"kvxfer {kvxfer.__version__}\n"
