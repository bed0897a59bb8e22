"""`scaleray dashboards write` and `install`: files, and the ways in which a Grafana refuses."""

import json
import socket

import pytest
from stand_in_grafana import TOKEN, stand_in

from scaleray.cli.main import run_command


def write(*words):
    return run_command(["dashboards", "write", *map(str, words)])


@pytest.fixture
def grafana(monkeypatch):
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    with stand_in() as server:
        yield server


def install(address, *words):
    return run_command(["dashboards", "install", "--grafana", address, *words])


def refusal(capsys, code, *words):
    """The message of an install that failed with this exit code; it never has the token."""
    assert install(*words) == code
    said = capsys.readouterr()
    assert said.out == "" and TOKEN not in said.err and "Traceback" not in said.err
    return said.err


def test_written_files_pass_the_check(tmp_path, capsys):
    assert write("--folder", tmp_path / "new" / "boards") == 0
    assert write("--folder", tmp_path / "new" / "boards", "--check") == 0
    assert "all files are up to date" in capsys.readouterr().out


def test_rules_with_measured_limits_take_the_place_of_the_usual_ones(tmp_path, capsys):
    rules = tmp_path / "measured.yaml"
    rules.write_text("# measured\ngroups: []\n")
    assert write("--folder", tmp_path / "boards", "--alerts", rules) == 0
    assert (tmp_path / "boards" / "alerts.yaml").read_text() == rules.read_text()
    assert write("--folder", tmp_path / "boards", "--alerts", rules, "--check") == 0
    assert write("--folder", tmp_path / "boards", "--check") == 1, "these are not the usual ones"
    rules.write_text("limits: 3\n")
    assert write("--folder", tmp_path / "boards", "--alerts", rules) == 2
    assert write("--folder", tmp_path / "boards", "--alerts", tmp_path / "none.yaml") == 2
    assert "has no Prometheus rules in `groups`" in capsys.readouterr().err


def test_the_check_names_a_file_edited_by_hand_and_one_that_is_missing_and_writes_nothing(tmp_path, capsys):
    write("--folder", tmp_path)
    edited = (tmp_path / "run.json").read_text().replace("Throughput", "Speed", 1)
    (tmp_path / "run.json").write_text(edited)
    (tmp_path / "ranks.json").unlink()
    (tmp_path / "cluster.json").write_bytes(b"\xff\xfe")
    capsys.readouterr()
    assert write("--folder", tmp_path, "--check") == 1
    said = capsys.readouterr()
    assert f"{tmp_path / 'run.json'} differs from the generated file" in said.err
    assert f"{tmp_path / 'cluster.json'} differs from the generated file" in said.err
    assert f"{tmp_path / 'ranks.json'} is missing" in said.err
    assert said.out == f"run scaleray dashboards write --folder {tmp_path}\n"
    assert (tmp_path / "run.json").read_text() == edited and not (tmp_path / "ranks.json").exists()


def test_json_tells_what_was_written_and_what_differs(tmp_path, capsys):
    write("--folder", tmp_path, "--json")
    written = json.loads(capsys.readouterr().out)
    assert written["differ"] == [] and written["written"]["run.json"] == str(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("{}")
    assert write("--folder", tmp_path, "--check", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differ"] == ["run.json"] and found["written"] == {}


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert write("--folder", tmp_path / "file") == 2
    assert f"--folder {tmp_path / 'file'} cannot be written" in capsys.readouterr().err


def test_install_imports_all_dashboards_into_a_folder_and_again_over_themselves(grafana, capsys):
    for _ in range(2):
        assert install(grafana.address) == 0
        said = capsys.readouterr().out
        assert f"run: {grafana.address}/d/scaleray-run/page" in said and TOKEN not in said
    assert set(grafana.dashboards) == {f"scaleray-{name}" for name in ("run", "ranks", "cluster", "scaling")}
    (folder,) = {folder for folder, _ in grafana.dashboards.values()}
    assert [one["uid"] for one in grafana.folders if one["title"] == "scaleray"] == [folder]


def test_install_takes_the_token_from_the_variable_that_is_named(grafana, monkeypatch, capsys):
    monkeypatch.delenv("GRAFANA_TOKEN")
    monkeypatch.setenv("MINE", f"{TOKEN}\n")
    assert install(grafana.address, "--token-env", "MINE", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dashboards"]["ranks"].endswith("/d/scaleray-ranks/page")


def test_install_without_a_token_says_which_variable_it_wants(grafana, monkeypatch, capsys):
    monkeypatch.delenv("GRAFANA_TOKEN")
    assert "The environment variable GRAFANA_TOKEN is not set" in refusal(capsys, 2, grafana.address)
    assert grafana.asked == []


@pytest.mark.parametrize("token", ["two\nlines", "größer", " "])
def test_what_can_be_no_token_is_not_sent_or_shown(grafana, monkeypatch, capsys, token):
    monkeypatch.setenv("GRAFANA_TOKEN", token)
    said = refusal(capsys, 2, grafana.address)
    assert "The environment variable GRAFANA_TOKEN is" in said and (token not in said or token == " ")
    assert grafana.asked == []


def test_a_port_that_nobody_listens_on_is_one_message(grafana, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = refusal(capsys, 2, f"http://127.0.0.1:{port}")
    assert f"--grafana http://127.0.0.1:{port} does not answer: [Errno 111] Connection refused." in said


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (
            (401, {}, b'{"message": "Invalid API key"}'),
            2,
            "rejected the token in GRAFANA_TOKEN (401): it needs a valid token",
        ),
        ((403, {}, b'{"message": "no access"}'), 2, "a token with the right to edit dashboards and folders"),
        ((404, {}, b"nothing here"), 2, " has no /api/folders?limit=1000."),
        ((412, {}, b'{"message": "version-mismatch"}'), 1, "rejected the dashboard (412): version-mismatch."),
        ((500, {}, f"the token {TOKEN} broke me".encode()), 1, "failed (500): the token *** broke me."),
        ((503, {}, b""), 1, "failed (503): Service Unavailable."),
        ((302, {"Location": "https://u:p@elsewhere/login?a=b"}, b""), 2, "it points to https://elsewhere/login:"),
        ((200, {}, b"<html>a router</html>"), 2, "is not a Grafana server: its response from"),
    ],
)
def test_each_refusal_is_one_clear_message(grafana, capsys, answer, code, words):
    grafana.answer = answer
    assert words in refusal(capsys, code, grafana.address)
    assert len(grafana.asked) == 1


def test_a_server_that_goes_away_in_the_middle_is_one_message(grafana, capsys):
    grafana.answer = (200, {}, b"")
    assert "is not a Grafana server: its response from" in refusal(capsys, 2, grafana.address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:3000", "it must begin with http:// or https://"),
        ("ftp://127.0.0.1", "it must begin with http:// or https://"),
        ("http://", "it must begin with http:// or https://"),
        ("http://admin:hunter2@127.0.0.1:3000", "it must not contain a user, password or key"),
        ("http://127.0.0.1:3000?api_key=hunter2", "it must not contain a user, password or key"),
        ("http://127.0.0.1:port", "--grafana http://127.0.0.1:port does not answer: nonnumeric port"),
        ("http://[::1", "--grafana http://[::1 is not an address"),
    ],
)
def test_an_address_that_is_none_is_one_message_without_its_secrets(grafana, capsys, address, words):
    said = refusal(capsys, 2, address)
    assert words in said and "hunter2" not in said
    assert grafana.asked == []


def test_links_of_alerts_begin_with_the_address_of_a_grafana(tmp_path, capsys):
    assert run_command(["dashboards", "write", "--folder", str(tmp_path), "--grafana", "http://grafana:3000/"]) == 0
    links = [line for line in (tmp_path / "alerts.yaml").read_text().splitlines() if "panel: " in line]
    assert len(links) >= 16 and all("panel: http://grafana:3000/d/" in line for line in links)
    assert run_command(["dashboards", "write", "--folder", str(tmp_path), "--grafana", "ftp://me:hunter2@x"]) == 2
    assert "hunter2" not in capsys.readouterr().err
    assert run_command(["dashboards", "write", "--grafana", "http://a", "--alerts", "mine.yaml"]) == 2
