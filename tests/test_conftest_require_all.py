"""TIDINGS_REQUIRE_ALL=1 turns each skip and each expected failure into a failure, and nothing else. A run in the
background passes the default handler of SIGINT to its child processes.

Each test runs pytest with a copy of our conftest.py.
"""

import signal
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

TESTS = """
    import pytest

    def test_passes():
        pass

    @pytest.mark.skipif(True, reason="by condition")
    def test_condition():
        raise AssertionError

    def test_missing_module():
        pytest.importorskip("no_such_module")

    @pytest.fixture
    def service():
        pytest.skip("by fixture")

    def test_fixture(service):
        raise AssertionError

    @pytest.mark.xfail(reason="by expectation", strict=True)
    def test_expected_failure():
        raise AssertionError
"""
MODULE = "import pytest\npytest.importorskip('no_such_module')"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty project with our conftest.py."""
    monkeypatch.delenv("TIDINGS_REQUIRE_ALL", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # conftest.py imports from tests.support
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    return pytester


def test_skips_and_expected_failures_pass_by_default(project: pytest.Pytester) -> None:
    project.makepyfile(test_skips=TESTS, test_module=MODULE)
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1, skipped=4, xfailed=1)
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_skips_and_expected_failures_fail_if_all_is_required(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("TIDINGS_REQUIRE_ALL", "1")
    project.makepyfile(test_skips=TESTS)
    result = project.runpytest_inprocess("-n", str(processes))
    outcomes = result.parseoutcomes()
    # A failure before the body of a test is an error.
    assert (outcomes["passed"], outcomes["failed"], outcomes["errors"]) == (1, 2, 2)
    message = "test_skips.py::test_missing_module did not pass, and TIDINGS_REQUIRE_ALL=1 *no_such_module*"
    result.stdout.fnmatch_lines_random([message])
    assert project.runpytest_inprocess("-k", "test_passes").ret == pytest.ExitCode.OK


def test_module_that_skips_itself_is_an_error_if_all_is_required(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDINGS_REQUIRE_ALL", "1")
    project.makepyfile(test_module=MODULE)
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)


def test_child_processes_of_a_background_run_react_to_ctrl_c(project: pytest.Pytester) -> None:
    project.makepyfile(
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
        result = project.runpytest_subprocess()
    finally:
        signal.signal(signal.SIGINT, before)
    result.assert_outcomes(passed=1)
