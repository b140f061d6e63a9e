"""The file of keys: what it may say, what it must not, and where none of it may be seen."""

import logging
import os
from pathlib import Path

import pytest

from penstock.config.api_keys import read_keys, read_secret
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.server.tenants import Access

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys.yaml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def config(path: str | None = None, api_key: str | None = None, **access: object) -> EngineConfig:
    return EngineConfig(
        model="tiny", api_key=api_key, access_config={"api_keys_file": path, **access}
    )


def headers(value: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", value.encode())]


def test_names_and_keys_with_and_without_settings(tmp_path):
    path = write(
        tmp_path,
        f"alice: {ALICE}\n"
        f"bob: {{key: {BOB}, weight: 2.5, allow_priority: true, max_queued_requests: 9}}\n",
    )
    access = Access.load(config(path))
    alice, bob = access.tenants
    assert (alice.name, alice.weight, alice.may_set_priority) == ("alice", 1.0, False)
    assert (bob.weight, bob.may_set_priority, bob.max_queued_requests) == (2.5, True, 9)
    assert access.find(headers(f"Bearer {ALICE}")) is alice
    assert access.find(headers(f"bearer {BOB}")) is bob
    assert access.find(headers(f"BEARER   {BOB}")) is bob


def test_json_is_yaml_too(tmp_path):
    path = write(tmp_path, f'{{"alice": "{ALICE}", "bob": {{"key": "{BOB}", "weight": 2}}}}')
    assert [key.name for key in read_keys(config(path))] == ["alice", "bob"]


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}"],
)
def test_what_is_no_key_is_nobody(tmp_path, value):
    assert Access.load(config(write(tmp_path, f"alice: {ALICE}"))).find(headers(value)) is None


def test_two_authorization_headers_are_nobody(tmp_path):
    access = Access.load(config(write(tmp_path, f"alice: {ALICE}")))
    assert access.find(headers(f"Bearer {ALICE}") * 2) is None


def test_the_single_key_goes_on_working_beside_the_file(tmp_path):
    access = Access.load(config(write(tmp_path, f"alice: {ALICE}"), api_key="old"))
    assert access.find(headers("Bearer old")).name == "api_key"
    assert access.find(headers(f"Bearer {ALICE}")).name == "alice"
    assert access.find(headers("Bearer old")).may_read_metrics


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alice: short", "'alice': key is not usable, it must be a text of 16 or more characters"),
        ("alice: 'with space 0123456789'", "visible ASCII"),
        ("alice: 1234567890123456789", "put a key of digits in quotes"),
        (f"alice: {ALICE}\nbob: {ALICE}", "'alice' and 'bob' have the same key"),
        (f"alice: {ALICE}\nalice: {BOB}", "'alice' is given twice"),
        (f"api_key: {ALICE}", "is no name of a key"),
        (f"alice: {{key: {ALICE}, wieght: 2}}", "did you mean 'weight'"),
        (f"alice: {{key: {ALICE}, weight: 0}}", "weight is 0"),
        ("alice: {weight: 2}", "'alice': key"),
        ("", "has 0 keys"),
        ("- a\n- b", "must be a mapping"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path, text, said):
    with pytest.raises(ConfigError) as refused:
        read_keys(config(write(tmp_path, text)))
    assert said in str(refused.value)
    for secret in (ALICE, BOB, "short", "0123456789", "1234567890123456789"):
        assert secret not in str(refused.value).replace(str(tmp_path), "")


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read api_keys_file .*No such file"):
        read_keys(config(str(tmp_path / "none")))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="must be a plain file"):
        read_keys(config(str(tmp_path / "pipe")))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_file_that_others_may_read_gives_a_warning(tmp_path, caplog, mode, warns):
    path = write(tmp_path, f"alice: {ALICE}", mode)
    with caplog.at_level(logging.WARNING):
        read_keys(config(path))
    assert ("chmod 600" in caplog.text) == warns
    assert ALICE not in caplog.text


def test_no_secret_is_dumped_shown_or_handed_to_another_process(tmp_path):
    secret = "a secret of many characters"
    made = config(write(tmp_path, f"alice: {ALICE}"), api_key="old-key", cache_salt_secret=secret)
    access = Access.load(made)
    shown = f"{made!r} {made.model_dump(mode='json')} {access.to_task()} {read_keys(made)!r}"
    for one in (ALICE, "old-key", secret):
        assert one not in shown
    again = Access.from_task(access.to_task())
    assert again.tenants == access.tenants
    assert again.find(headers(f"Bearer {ALICE}")) == access.tenants[1]


def test_a_secret_that_is_too_short_is_refused_without_being_shown(tmp_path):
    with pytest.raises(ConfigError) as refused:
        config(cache_salt_secret="too short")
    assert "cache_salt_secret is not usable" in str(refused.value)
    assert "too short" not in str(refused.value)
    (tmp_path / "secret").write_text("few\n")
    with pytest.raises(ConfigError, match="holds 3 bytes"):
        read_secret(config(cache_salt_secret_file=str(tmp_path / "secret")))
    with pytest.raises(ConfigError, match="not both"):
        config(cache_salt_secret="x" * 16, cache_salt_secret_file="f")


def test_scopes_survive_a_restart_with_a_secret_and_differ_between_keys(tmp_path):
    path = write(
        tmp_path,
        f"alice: {ALICE}\nbob: {BOB}\n"
        "carol: {key: sk-carol-0123456789, cache_group: team}\n"
        "dave: {key: sk-dave-0123456789, cache_group: team}\n"
        "team: sk-team-0123456789\n",
    )

    def scopes(**access: object) -> list[str | None]:
        tenants = Access.load(config(path, **access)).tenants
        assert [one.salt_scope for one in tenants] == [one.prefix_scope for one in tenants]
        return [one.prefix_scope for one in tenants]

    (tmp_path / "secret").write_text("s" * 32 + "\n")
    alice, bob, carol, dave, team = scopes(cache_salt_secret="s" * 32)
    assert carol == dave and len({alice, bob, carol, team}) == 4
    assert scopes(cache_salt_secret_file=str(tmp_path / "secret")) == [
        alice,
        bob,
        carol,
        dave,
        team,
    ]
    assert scopes(cache_salt_secret="t" * 32)[0] != alice
    assert scopes()[0] != scopes()[0]  # drawn at every start


def test_open_sharing_leaves_only_salted_requests_apart(tmp_path):
    path = write(tmp_path, f"alice: {ALICE}\nbob: {BOB}")
    alice, bob = Access.load(config(path, prefix_sharing="open")).tenants
    assert alice.prefix_scope is bob.prefix_scope is None
    assert alice.salt_scope != bob.salt_scope


def test_without_keys_everybody_is_one_tenant():
    [anyone] = Access.load(config()).tenants
    assert anyone.prefix_scope is None and not anyone.may_set_priority
    [anyone] = Access.load(config(allow_priority=True)).tenants
    assert anyone.may_set_priority
