"""Settings and fixtures of all tests: no silent skips in CI, the Hypothesis profile, SIGINT, the seed, the event loop.

With ``TIDINGS_REQUIRE_ALL=1`` a test that is skipped, or that fails as expected, counts as failed, and so does a module
that skips itself while it is collected. Without it, a missing service may skip its tests. Tests that ``-k`` or ``-m``
deselect do not count.
"""

import os
import random
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.shared_pipe import SharedPipe
from tests.support.stress import sized

REQUIRE_ALL = os.environ.get("TIDINGS_REQUIRE_ALL") == "1"

pytest.register_assert_rewrite("tests.support.promises")  # show the values of its assertions, as in a test

# The programs that the tests start buffer their output, as they do for a user.
os.environ.pop("PYTHONUNBUFFERED", None)

# Without TIDINGS_SEED, random tests use the same seed in each run, so that a new failure comes from a change.
# TIDINGS_SEED is a number, or `random` for a new one. All processes of a run read that number from the environment.
if os.environ.get("TIDINGS_SEED") == "random":
    os.environ["TIDINGS_SEED"] = str(random.randrange(10**6))
HAS_DEFAULT_SEED = "TIDINGS_SEED" not in os.environ
SEED = int(os.environ.get("TIDINGS_SEED", "1"))

# Names every setting that Hypothesis' own profiles differ in: on a CI service Hypothesis has already loaded its "ci",
# and a profile inherits the other settings from the loaded one.
settings.register_profile(
    "tidings",
    max_examples=sized(100, 1_000),
    deadline=None,  # a busy machine is not a defect; pytest-timeout ends a hang
    suppress_health_check=[HealthCheck.too_slow],  # for the same reason
    derandomize=HAS_DEFAULT_SEED,
    print_blob=True,  # repeats a failure on another machine
)
settings.load_profile("tidings")


# A shell starts a background job with SIGINT ignored, and child processes inherit that: tests of Ctrl-C would hang. A
# handler is not inherited. It does nothing, so that the test run itself still ignores the signal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads the option
def pytest_configure(config: pytest.Config) -> None:
    if not HAS_DEFAULT_SEED:
        config.option.hypothesis_seed = SEED


def pytest_report_header() -> str:
    return "TIDINGS_SEED is not set: each run has the same seed" if HAS_DEFAULT_SEED else f"TIDINGS_SEED={SEED}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of this run, and name it in the report of a test that fails."""
    request.node.add_report_section("setup", "seed", f"TIDINGS_SEED={SEED} repeats this run")
    return SEED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the long files first if several processes share the files: at the end, the others would wait for them."""
    if hasattr(config, "workerinput"):  # pytest-xdist sets this in its processes
        items.sort(key=lambda item: item.path.parent.name != "end_to_end")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Run ``@pytest.mark.anyio`` tests on asyncio, the only loop that uvicorn and NATS support."""
    return "asyncio"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[SharedPipe]:
    pipe = SharedPipe(tmp_path / "pipe")
    yield pipe
    os.close(pipe.descriptor)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A copy of the example workspace, which a test may change."""
    example = Path(__file__).parents[1] / "examples" / "workspace"
    return Path(shutil.copytree(example, tmp_path / "board"))


# tryfirst makes a wrapper the outermost: it gets the report after pytest's own plugins have marked it as skipped or as
# an expected failure.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if REQUIRE_ALL and report.skipped:
        if hasattr(report, "wasxfail"):
            reason = f"expected to fail: {report.wasxfail}"
            del report.wasxfail  # a failed report that has it is not counted
        else:
            reason = skip_reason(report)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} did not pass, and TIDINGS_REQUIRE_ALL=1 requires it to: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if REQUIRE_ALL and report.skipped:
        reason = skip_reason(report)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was not collected, and TIDINGS_REQUIRE_ALL=1 requires it to be: {reason}"
    return report


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip, which pytest keeps as (path, line, reason)."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
