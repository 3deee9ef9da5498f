from __future__ import annotations

import sys

import pytest

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.scheduler import choice
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry.url import RedisUrl


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://r1", "r1:6379"),
        ("redis://user:secret@r1:7000/2", "r1:7000"),
        ("rediss://r1:7000", "r1:7000"),
        ("unix:///run/redis.sock", "/run/redis.sock"),
        ("redis+sentinel://s1:1,s2/fleet", "service fleet of the Sentinels s1:1,s2"),
        ("redis+sentinel://u:secret@s1/fleet/3", "service fleet of the Sentinels s1"),
        ("redis+cluster://u:secret@n1:7000,n2", "the cluster of n1:7000,n2"),
    ],
)
def test_name_of_a_url_does_not_show_its_password(url, name):
    parsed = RedisUrl.parse(url)
    assert parsed.name == name
    assert "secret" not in repr(parsed)


def test_url_with_sentinels_says_where_they_are_and_how_to_log_in():
    parsed = RedisUrl.parse(
        "rediss+sentinel://us%65r:p%40ss@s1:1,s2,[::1]:3/fleet/3?sentinel_password=word"
    )
    assert parsed.sentinels == (("s1", 1), ("s2", 26379), ("::1", 3))
    assert parsed.service == "fleet"
    assert parsed.options == {"db": 3, "username": "user", "password": "p@ss", "ssl": True}
    assert parsed.sentinel_options == {"password": "word", "ssl": True}


def test_url_of_a_cluster_names_some_of_its_nodes():
    parsed = RedisUrl.parse("rediss+cluster://user:p%40ss@n1:7000,n2?ssl_ca_certs=ca.crt")
    assert parsed.nodes == (("n1", 7000), ("n2", 6379))
    login = {"username": "user", "password": "p@ss"}
    assert parsed.options == {**login, "ssl": True, "ssl_ca_certs": "ca.crt"}


def test_in_a_cluster_the_keys_of_a_fleet_are_in_one_slot():
    with pytest.raises(InvalidArgument, match=r"'kvxfer'.*in braces, as '\{kvxfer\}'"):
        choice.make_registry("redis+cluster://n1", LeasePolicy())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "begins with ''"),
        ("http://r1", "begins with 'http'"),
        ("localhost:6379", "begins with 'localhost'"),  # text
        ("redis://", "names no host"),
        ("redis://:secret@r1:port", "Port could not be cast"),
        ("redis://:secret@r1/fleet", "the database is 'fleet'"),
        ("unix://", "names no socket"),
        ("redis+sentinel://s1", "names no service"),
        ("redis+sentinel://s1,/fleet", "'' names no Sentinel"),
        ("redis+sentinel://s1/fleet/x", "the database is 'x'"),
        ("redis+sentinel://s1/fleet?secret=1", "unknown option, 'secret'"),
        ("redis+cluster://n1,", "'' names no node"),
        ("redis+cluster://n1/3", "a cluster has no databases"),
        ("redis+cluster://n1?db=3", "unknown option, 'db'"),
    ],
)
def test_invalid_url_is_refused_with_the_valid_forms(url, words):
    with pytest.raises(InvalidArgument) as refusal:
        RedisUrl.parse(url)
    assert words in str(refusal.value)
    assert "redis://HOST:PORT/DB" in str(refusal.value)
    assert ":secret" not in str(refusal.value)


def test_embedded_needs_no_url():
    assert isinstance(choice.make_registry("embedded", LeasePolicy()), EmbeddedRegistry)


def test_missing_redis_package_names_its_install_command(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvxfer.scheduler.redis_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(NotBuilt, match=r"pip install 'kvxfer\[server\]'"):
        choice.make_registry("redis://r1", LeasePolicy())
