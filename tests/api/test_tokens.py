from __future__ import annotations

import gc

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.web.tokens import Caller, Scope, Tokens, parse_tokens, watch_tokens

TOKEN = "0123456789abcdef"


def test_file_names_callers_scopes_and_tokens():
    tokens = parse_tokens(
        b"# of the staging cluster\n\nnode-5 worker 0123456789abcdef\n"
        b"  ops\tadmin,router  0123456789abcdeg==\nops admin,router another-token-of-ops\n"
    )
    assert tokens.caller(TOKEN) == Caller("node-5", frozenset({Scope.WORKER}))
    ops = Caller("ops", frozenset({Scope.ADMIN, Scope.ROUTER}))
    assert tokens.caller("0123456789abcdeg==") == tokens.caller("another-token-of-ops") == ops


@pytest.mark.parametrize(
    "token", ["", "0123456789abcde", TOKEN + "0", TOKEN.upper(), "\ud800", "é" * 16]
)
def test_unknown_token_has_no_caller(token):
    assert parse_tokens(f"node-5 worker {TOKEN}".encode()).caller(token) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no token"),
        (b"# nothing\n", "has no token"),
        (b"\xff", "no UTF-8"),
        (b"a worker", "line 1 of the tokens file has 2 words"),
        (b"a worker 0123456789abcdef x", "has 4 words"),
        (b"a cook 0123456789abcdef", "has scope 'cook'; use worker, router, trainer, admin, "),
        (b"a worker, 0123456789abcdef", "has scope ''"),
        (b"/ worker 0123456789abcdef", "names '/'"),
        (b"a worker short", "at least 16"),
        (b"a worker 0123456789abcdef:", "no bearer token"),
        (b"a worker 0123456789abcdef\nb router 0123456789abcdef", "line 2 .* of 'a'"),
    ],
)
def test_malformed_file_is_refused_by_line(content, words):
    with pytest.raises(InvalidArgument, match=words):
        parse_tokens(content)


def test_error_never_quotes_a_token():
    with pytest.raises(InvalidArgument) as error:
        parse_tokens(b"a worker secret:of:the:cluster")
    assert "secret" not in str(error.value)


def test_token_itself_is_not_kept(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"a worker {TOKEN}")
    tokens = watch_tokens(file).current
    reachable, seen = [tokens], set()
    while reachable:
        thing = reachable.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        assert thing not in (TOKEN, TOKEN.encode())
        if isinstance(thing, (Tokens, Caller, dict, frozenset, tuple)):
            reachable += gc.get_referents(thing)


def test_two_processes_hash_a_token_differently():
    content = f"a worker {TOKEN}".encode()
    one, other = parse_tokens(content), parse_tokens(content)
    assert set(one._callers) != set(other._callers)
