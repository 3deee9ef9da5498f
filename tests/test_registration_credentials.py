"""The credentials that a worker shows the control plane: its token, and its lease's secret."""

from __future__ import annotations

import logging
import stat

import pytest

from kvxfer.client import Credentials, Registration
from kvxfer.errors import (
    Forbidden,
    Unauthenticated,
)
from kvxfer.instance_secret import kept_secret
from kvxfer.instances import Load
from kvxfer.web.tokens import watch_tokens
from tests.virtual_time import passes
from verify.processes.control_plane import worker

from .test_registration import INTERVAL, LEASE, client, control_plane, registered

__all__ = ["client", "control_plane", "registered"]


# --- the secret of the lease -----------------------------------------------------------------


async def test_worker_acts_with_the_secret_of_its_lease(client, registered):
    async with registered(load=Load) as registration:
        first = registration.secret
        assert first is not None
        with pytest.raises(Forbidden):
            await client.heartbeat("p", registration.epoch)
        await passes(2 * LEASE)
        assert registration.registered
        await client.deregister("p", registration.epoch)
        await passes(INTERVAL)
        assert registration.secret not in (first, None)
        await passes(2 * LEASE)
        assert registration.registered


async def test_secret_is_in_a_file_for_the_workers_user_as_long_as_it_is_valid(
    client, registered, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVXFER_RUNTIME_DIR", str(tmp_path / "new"))
    file = tmp_path / "new" / "p.secret"
    async with registered() as registration:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert kept_secret("p") == registration.secret
        await client.deregister("p", registration.epoch)
        await passes(INTERVAL)
        assert kept_secret("p") == registration.secret
        assert list(file.parent.iterdir()) == [file]
    assert not list(file.parent.iterdir())


async def test_secret_that_cannot_be_kept_costs_no_lease(registered, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVXFER_RUNTIME_DIR", str(tmp_path / "file"))
    async with registered() as registration:
        assert registration.registered
    assert "name a folder for it in KVXFER_RUNTIME_DIR" in caplog.text


async def test_worker_needs_no_secret_if_the_control_plane_has_none(
    network, clock, monkeypatch, tmp_path
):
    """An earlier control plane ignores that the worker would take a secret."""
    monkeypatch.setattr("kvxfer.api.routes.instances.new_secret", lambda: None)
    monkeypatch.setenv("KVXFER_RUNTIME_DIR", str(tmp_path))
    async with network.control_plane(lease_seconds=LEASE), network.client() as client:
        async with Registration(client, worker("p"), clock=clock) as registration:
            assert registration.secret is None
            await passes(2 * LEASE)
            assert registration.registered
        assert not list(tmp_path.iterdir())


# --- tokens ----------------------------------------------------------------------------------


async def test_worker_keeps_its_lease_while_its_token_is_exchanged(
    network, clock, tmp_path, caplog
):
    accepted, held = tmp_path / "tokens", tmp_path / "token"
    accepted.write_text("node worker token-of-last-month\n")
    held.write_text("token-of-last-month\n")
    tokens = watch_tokens(accepted)
    async with (
        network.control_plane(lease_seconds=600, tokens=tokens),
        network.client(credentials=Credentials(token_file=held)) as client,
        Registration(client, worker("p"), clock=clock) as registration,
    ):
        epoch = registration.epoch
        accepted.write_text("node worker token-of-this-month\n")
        tokens.refresh()
        await registration.heartbeat()
        assert "does not know this token" in caplog.text
        assert "month" not in caplog.text
        held.write_text("token-of-this-month\n")
        with caplog.at_level(logging.INFO, logger="kvxfer.registration"):
            await registration.heartbeat()
        assert caplog.records[-1].message == "instance p is registered again"
        assert (registration.epoch, registration.registered) == (epoch, True)


async def test_worker_without_the_right_token_does_not_start(network, clock, tmp_path):
    accepted = tmp_path / "tokens"
    accepted.write_text("node router token-of-a-router\n")
    async with network.control_plane(tokens=watch_tokens(accepted)):
        for token, error in ((None, Unauthenticated), ("token-of-a-router", Forbidden)):
            async with network.client(credentials=Credentials(token=token)) as client:
                with pytest.raises(error):
                    async with Registration(client, worker("p"), clock=clock):
                        pass
