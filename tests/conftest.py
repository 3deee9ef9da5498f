"""Every test is of one of three kinds:

- *virtual*, without a mark: no socket, no other process; waits take virtual time.
- `native`: the real engine, real sockets, real Redis. Asserts order, bytes and names, no deadline.
- `realtime`: killed, frozen and starved processes. These tests run one after the other, on an idle
  machine, and allow a stall of two seconds.

No test waits for an amount of time, and only `realtime` tests read a clock (scripts/check-waits).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import hypothesis
import pytest

from tests.virtual_time import VirtualClock, VirtualLoop
from verify.processes.redis_server import RedisServer

if TYPE_CHECKING:
    from tests.network import Network

_SEED: Final = "KVXFER_TEST_SEED"

# Triton's kernels run on the CPU; set before Triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Objects that earlier tests have left, such as torch's process groups, hang or crash if a forked
# process destroys them, so it does not collect them.
os.register_at_fork(after_in_child=gc.freeze)

# In parallel runs, one process runs a file, so the longest files begin first.
_LONG: Final = (
    "verify/simulation/test_sessions.py",
    "cli/test_demo.py",
    "router/test_cluster.py",
    "cli/test_worker.py",
    "verify/attack/test_attacks.py",
    "kv/test_random_faults_of_ranks.py",
    "kv/test_plan_oracle.py",
    "cli/test_bench.py",
)

# No test limits the time of one example.
hypothesis.settings.register_profile("kvxfer", deadline=None)
hypothesis.settings.load_profile("kvxfer")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    # The kind of loop is decided when a test begins: a mark may be that of a parameter.
    return {"loop": _new_loop}


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop() if _real else VirtualLoop()


_real = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _real
    _real = any(item.get_closest_marker(kind) for kind in ("native", "realtime"))


@pytest.fixture(autouse=True, scope="session")
def _runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives workers of this process a folder for their secrets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVXFER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = config.rootpath / "tests"
    items.sort(key=lambda item: item.path not in [tests / name for name in _LONG])


@pytest.fixture
async def clock() -> VirtualClock:
    """The clock of the test's loop; on a real loop, a clock that the test moves."""
    loop = asyncio.get_running_loop()
    return loop.clock if isinstance(loop, VirtualLoop) else VirtualClock()


def pytest_configure() -> None:
    """Sets one seed for a run, in all of its processes: KVXFER_TEST_SEED repeats its choices."""
    os.environ.setdefault(_SEED, str(random.SystemRandom().getrandbits(32)))
    # A suite in the background of a shell ignores SIGINT; the processes of its tests must not.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"{_SEED}={os.environ[_SEED]}"


@pytest.fixture
def network(clock: VirtualClock) -> Network:
    """The network in which control planes, routers and workers of this test's loop listen."""
    from tests.network import Network

    return Network(clock)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of a test, which follows from the run's seed and the test's name."""
    return random.Random(f"{os.environ[_SEED]} {request.node.nodeid}").getrandbits(32)


@pytest.fixture
def rng(seed: int) -> random.Random:
    print(f"{_SEED}={os.environ[_SEED]}")
    return random.Random(seed)


@pytest.fixture(params=["local", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server for tests that neither stop nor pause it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def empty_redis(shared_redis: RedisServer) -> RedisServer:
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis
