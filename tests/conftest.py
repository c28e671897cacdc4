"""What all tests share: no silent skips where everything must run, the Hypothesis profiles, the seed, the event loop.

With ``TIDINGS_REQUIRE_ALL=1`` a test that skips, or that fails as it was expected to, is a failure, and so is a
module that skips itself while it is collected. Elsewhere a missing service may skip its tests. Tests that ``-k`` or
``-m`` leave out are nobody's failure.
"""

import os
import random
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REQUIRE_ALL = os.environ.get("TIDINGS_REQUIRE_ALL") == "1"

pytest.register_assert_rewrite("tests.support.promises")  # show the values of its assertions, as in a test

# Every setting that Hypothesis' own profiles differ in is named: where it recognises a CI service it has already
# chosen its own "ci", and a profile inherits whatever is left open from the one in force.
settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,  # a busy machine is not a defect; pytest-timeout catches a hang
    suppress_health_check=[HealthCheck.too_slow],  # nor is it one of the strategies
    derandomize=False,  # each run looks somewhere new
    print_blob=False,  # the local example database replays a failure
)
settings.register_profile(
    "ci",
    settings.get_profile("default"),
    print_blob=True,  # the database is gone with the machine; the blob replays the failure elsewhere
)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


# A shell starts a background job with SIGINT ignored, and child processes inherit that: tests of Ctrl-C would hang. A
# handler is not inherited. It does nothing, so that the test run itself still ignores the signal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


# Named by its number in a test's id, so all processes of a run must have the same.
SEED = os.environ.setdefault("TIDINGS_SEED", str(random.randrange(10**6)))


def pytest_report_header() -> str:
    return f"TIDINGS_SEED={SEED}"


LONG_FILES = (
    "test_faults.py",
    "test_promises.py",
    "test_matrix.py",
    "test_resume.py",
    "test_killed.py",
    "test_restart.py",
)
"""The first to be begun where several processes share the files: at the end, the others would wait for them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # pytest-xdist's mark of its processes
        items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """``@pytest.mark.anyio`` means asyncio: uvicorn and NATS know no other loop. A fixture of a module may need it."""
    return "asyncio"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A copy of the example workspace, which a test may change."""
    example = Path(__file__).parents[1] / "examples" / "workspace"
    return Path(shutil.copytree(example, tmp_path / "board"))


# tryfirst makes a wrapper the outermost: it sees the report after pytest's own plugins have made a skip or an
# expected failure of it.
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
    """Pytest keeps a skip as (path, line, reason)."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
