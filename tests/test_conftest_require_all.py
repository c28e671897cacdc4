"""TIDINGS_REQUIRE_ALL=1 turns everything that did not run, or was excused, into a failure, and nothing else. A run
in the background passes SIGINT's default to its child processes.

Each test runs pytest in a process of its own, with a copy of our conftest.py.
"""

import signal
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

# Every way to get out of running and passing, and one test that takes none of them.
EXCUSES = """
    import unittest
    import pytest

    def test_passes():
        pass

    @pytest.mark.skip(reason="by mark")
    def test_mark():
        raise AssertionError

    @pytest.mark.skipif(True, reason="by condition")
    def test_condition():
        raise AssertionError

    def test_call():
        pytest.skip("by call")

    def test_missing_module():
        pytest.importorskip("no_such_module")

    @pytest.fixture
    def service():
        pytest.skip("by fixture")

    def test_fixture(service):
        raise AssertionError

    @pytest.mark.parametrize("value", [])
    def test_no_parameters(value):
        raise AssertionError

    class TestUnittest(unittest.TestCase):
        def test_unittest(self):
            self.skipTest("by unittest")

    @pytest.mark.xfail(reason="by expectation", strict=True)
    def test_expected_failure():
        raise AssertionError

    @pytest.mark.xfail(reason="not even run", run=False)
    def test_not_run():
        raise AssertionError
"""
SKIPS, EXPECTED_FAILURES = 7, 2

MODULE_THAT_SKIPS_ITSELF = """
    import pytest

    pytest.importorskip("no_such_module")
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty project with our conftest.py, in which nothing is required yet."""
    monkeypatch.delenv("TIDINGS_REQUIRE_ALL", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    return pytester


@pytest.fixture
def require_all(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("TIDINGS_REQUIRE_ALL", "1")
    return inner


def test_elsewhere_a_test_may_be_excused(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_excuses=EXCUSES, test_module=MODULE_THAT_SKIPS_ITSELF)

    result = inner.runpytest_subprocess()

    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=SKIPS + 1, xfailed=EXPECTED_FAILURES)


@pytest.mark.parametrize("processes", [0, 2])
def test_no_excuse_counts_where_all_is_required(require_all: pytest.Pytester, processes: int) -> None:
    pytest.importorskip("xdist")
    require_all.makepyfile(test_excuses=EXCUSES)

    result = require_all.runpytest_subprocess("-n", str(processes))

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    outcomes = result.parseoutcomes()
    assert outcomes.pop("passed") == 1
    assert set(outcomes) == {"failed", "errors"}  # pytest's word for a failure before the test's own body
    assert sum(outcomes.values()) == SKIPS + EXPECTED_FAILURES
    result.stdout.fnmatch_lines_random(
        [
            "test_excuses.py::test_mark did not pass, and TIDINGS_REQUIRE_ALL=1 *by mark",
            "test_excuses.py::test_missing_module did not pass, and TIDINGS_REQUIRE_ALL=1 *no_such_module*",
            "test_excuses.py::test_expected_failure did not pass, and TIDINGS_REQUIRE_ALL=1 *by expectation",
        ]
    )


def test_an_expected_failure_alone_fails_the_run(require_all: pytest.Pytester) -> None:
    require_all.makepyfile(test_excuses=EXCUSES)

    result = require_all.runpytest_subprocess("-k", "test_passes or test_expected_failure")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1, deselected=SKIPS + EXPECTED_FAILURES - 1)


def test_a_module_that_skips_itself_is_an_error_where_all_is_required(require_all: pytest.Pytester) -> None:
    require_all.makepyfile(test_module=MODULE_THAT_SKIPS_ITSELF)

    result = require_all.runpytest_subprocess()

    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("test_module.py was not collected, and TIDINGS_REQUIRE_ALL=1 *no_such_module*")


def test_what_passes_or_is_deselected_is_no_failure(require_all: pytest.Pytester) -> None:
    require_all.makepyfile(test_excuses=EXCUSES)

    result = require_all.runpytest_subprocess("-k", "test_passes")

    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, deselected=SKIPS + EXPECTED_FAILURES)


def test_child_processes_of_a_background_run_react_to_ctrl_c(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        test_child="""
        import subprocess
        import sys

        def test_child():
            script = "import signal; print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)"
            assert subprocess.check_output([sys.executable, "-c", script], text=True) == "True\\n"
        """
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a job in the background
    try:
        result = inner.runpytest_subprocess()
    finally:
        signal.signal(signal.SIGINT, before)

    result.assert_outcomes(passed=1)
