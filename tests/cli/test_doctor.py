import json

from typer.testing import CliRunner

from kvxfer.cli import app


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
