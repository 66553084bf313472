"""The environment: defaults, bounds, unknown names, and that the README tells the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.settings import TABLE, Settings, SettingsError, load, readme_table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_defaults_load() -> None:
    settings = load({"PATH": "/bin"})
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "auto")
    assert settings.api_keys == ()


def test_values_are_read() -> None:
    settings = load({"NAPSCRIBE_PORT": "9000", "NAPSCRIBE_API_KEYS": "a, b,", "NAPSCRIBE_IDLE_SECONDS": "2.5"})
    assert (settings.port, settings.api_keys, settings.idle_seconds) == (9000, ("a", "b"), 2.5)


def test_an_empty_value_is_the_default() -> None:
    assert load({"NAPSCRIBE_PORT": ""}).port == 8000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NAPSCRIBE_PORT", "0"),
        ("NAPSCRIBE_PORT", "http"),
        ("NAPSCRIBE_PORT", "8000.5"),
        ("NAPSCRIBE_IDLE_SECONDS", "-1"),
        ("NAPSCRIBE_IDLE_SECONDS", "nan"),
        ("NAPSCRIBE_MAX_QUEUE", "0"),
        ("NAPSCRIBE_SPOOL_MB", "inf"),
        ("NAPSCRIBE_CPUS", "all"),
        ("NAPSCRIBE_CPUS", "1-0"),
        ("NAPSCRIBE_CPUS", "8191"),
        ("NAPSCRIBE_SPOOL_DIR", "~nobody-of-this-name/spool"),
        ("NAPSCRIBE_LATENCY_LOG", "~nobody-of-this-name/log"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_it_takes(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name}='{value}'.*takes"):
        load({name: value})


def test_an_unknown_name_stops_the_start_with_a_hint() -> None:
    with pytest.raises(SettingsError, match=r"NAPSCRIBE_IDLE_SECOND\..*Did you mean NAPSCRIBE_IDLE_SECONDS"):
        load({"NAPSCRIBE_IDLE_SECOND": "5"})


def test_a_hopeless_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="Known: NAPSCRIBE_HOST"):
        load({"NAPSCRIBE_XQZ": "5"})


def test_the_table_is_the_struct_and_is_small() -> None:
    assert [setting.field for setting in TABLE] == list(Settings.__struct_fields__)
    assert len(TABLE) <= 26


def test_the_readme_has_the_same_table() -> None:
    assert readme_table() in README.read_text()
