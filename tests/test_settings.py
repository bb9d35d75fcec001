from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from autotuner.errors import InputError, SettingsError
from autotuner.server.wire.requests import SubmittedJob
from autotuner.settings import (
    Limits,
    Settings,
    TuneKeywords,
    TuneOptions,
    database_url,
    package_version,
    parsed_bytes,
    server_url,
)


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_environment({})
    assert settings.database_url == "sqlite:///autotuner.sqlite"
    assert settings.threads is None
    assert settings.timeout_s == 30.0
    assert settings.cache_dir == Path.home() / ".cache" / "autotuner"
    assert settings.server_url == "http://127.0.0.1:8000"


def test_a_settings_value_made_without_arguments_is_the_default_one() -> None:
    assert Settings() == Settings.from_environment({})


def test_each_variable_is_read() -> None:
    settings = Settings.from_environment(
        {
            "AUTOTUNER_DATABASE": "postgresql+psycopg://me@host/tunings",
            "AUTOTUNER_THREADS": "2",
            "AUTOTUNER_TIMEOUT_S": "0.5",
            "AUTOTUNER_CACHE": "/var/cache/kernels",
            "AUTOTUNER_SERVER": "https://tuning:8443/",
            "AUTOTUNER_HOST": "0.0.0.0",
            "AUTOTUNER_ALLOWED_HOSTS": "tuning.example, tuner-1",
        }
    )
    assert settings == Settings(
        "postgresql+psycopg://me@host/tunings",
        2,
        0.5,
        Path("/var/cache/kernels"),
        "https://tuning:8443",
        "0.0.0.0",
        ("tuning.example", "tuner-1"),
    )


def test_the_environment_of_the_process_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNER_THREADS", "3")
    assert Settings.from_environment().threads == 3


@pytest.mark.parametrize(
    "path, url",
    [
        ("timings.sqlite", "sqlite:///timings.sqlite"),
        ("/data/timings.sqlite", "sqlite:////data/timings.sqlite"),
        ("a b?c.sqlite", "sqlite:///a%20b%3Fc.sqlite"),
        ("sqlite:///timings.sqlite", "sqlite:///timings.sqlite"),
    ],
)
def test_a_path_becomes_a_url_and_a_url_stays(path: str, url: str) -> None:
    assert Settings.from_environment({"AUTOTUNER_DATABASE": path}).database_url == url
    assert database_url(path) == url


def test_a_tilde_is_the_home_directory() -> None:
    assert database_url("~/t.sqlite") == f"sqlite:///{Path.home()}/t.sqlite"


@pytest.mark.parametrize("text", ["auto", "rich", "lines", "json", "none"])
def test_progress_has_five_formats(text: str) -> None:
    assert Settings.from_environment({"AUTOTUNER_PROGRESS": text}).progress == text


def test_another_format_of_progress_is_refused() -> None:
    with pytest.raises(SettingsError, match="AUTOTUNER_PROGRESS is 'bars': write auto, rich, lines, json or none"):
        Settings.from_environment({"AUTOTUNER_PROGRESS": "bars"})


def test_an_empty_variable_counts_as_not_set() -> None:
    names = ("DATABASE", "THREADS", "TIMEOUT_S", "CACHE", "SERVER")
    variables = {f"AUTOTUNER_{name}": " " for name in names}
    assert Settings.from_environment(variables) == Settings.from_environment({})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "²"])
def test_threads_that_are_no_whole_number_from_one_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=rf"AUTOTUNER_THREADS is '{text}': write a whole number from 1"):
        Settings.from_environment({"AUTOTUNER_THREADS": text})


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_a_timeout_that_is_not_above_zero_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=rf"AUTOTUNER_TIMEOUT_S is '{text}': write a number of seconds above 0"):
        Settings.from_environment({"AUTOTUNER_TIMEOUT_S": text})


def test_another_kind_of_database_is_refused_by_name_and_without_its_password() -> None:
    with pytest.raises(SettingsError, match="'mysql' database: write the path of an SQLite file") as caught:
        Settings.from_environment({"AUTOTUNER_DATABASE": "mysql://me:secret@host/tunings"})
    assert "secret" not in str(caught.value)


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_text("")
    with pytest.raises(SettingsError, match="which is a file: write a directory"):
        Settings.from_environment({"AUTOTUNER_CACHE": str(file)})


@pytest.mark.parametrize("url", ["http://tuning", "http://[::1]:8000", "https://me:secret@tuning:8443/prefix"])
def test_the_url_of_a_service_loses_only_the_slash_at_its_end(url: str) -> None:
    assert server_url(url) == server_url(f"{url}/") == url


@pytest.mark.parametrize("text", ["tuning", "tuning:81", "ftp://tuning", "http://", "http://tuning:port", "http://a b"])
def test_a_server_that_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no URL of a service: write http://HOST:PORT, such as http://127"):
        server_url(text)
    with pytest.raises(SettingsError, match=f"^AUTOTUNER_SERVER: '{text}' is no URL of a service"):
        Settings.from_environment({"AUTOTUNER_SERVER": text})


def test_the_options_of_a_job_have_the_same_names_and_defaults_for_python_callers_and_clients() -> None:
    fields = {name: getattr(TuneOptions(), name) for name in TuneOptions.names()}
    assert list(TuneKeywords.__annotations__) == list(fields)
    sent = SubmittedJob(model="bert-encoder:tiny")
    assert sent.tune_options() == TuneOptions()
    assert set(fields) <= set(SubmittedJob.model_fields)
    assert TuneOptions.of(limits=None, gap=0.5) == TuneOptions(gap=0.5)
    with pytest.raises(TypeError, match=r"^a tuning has no option 'bugdet_bytes': it has gap, .*budget_bytes, "):
        TuneOptions.of(bugdet_bytes=None)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"^a tuning has no option 'seconds': write limits=autotuner\.Limits\(seconds=\.\.\.\)"
    ):
        TuneOptions.of(seconds=20)  # type: ignore[call-arg]
    assert TuneOptions.from_json(TuneOptions(limits=Limits(3.0, 5), retry=True).to_json()).limits == Limits(3.0, 5)


def test_without_an_installation_the_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    assert package_version() == version("autotuner")
    monkeypatch.setattr("autotuner.settings.version", missing)
    assert package_version() == "unknown"


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2kB", 2000), ("1G", 10**9), ("1TiB", 1 << 40),
     ("64kib", 64 << 10), ("7B", 7), ("1,000 MiB", 1000 << 20)],
)  # fmt: skip
def test_a_number_of_bytes_is_read_with_its_unit(text: str, count: int) -> None:
    assert parsed_bytes(text, "--budget") == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1PiB", "1 2", "0x10", "1,00 MiB", "1000,000"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write a number of bytes, or one with a unit, such as 512MiB"):
        parsed_bytes(text, "--budget")


def test_no_budget_is_none() -> None:
    assert parsed_bytes(None, "--budget") is None
