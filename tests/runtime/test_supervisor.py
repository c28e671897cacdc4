"""A process that has ended starts again, and later each time if it ends soon."""

from tidings.runtime.supervisor import Restarts


def test_process_that_ends_soon_starts_later_each_time() -> None:
    now = 0.0
    restarts = Restarts(clock=lambda: now)
    assert restarts.delay == 0.0
    delays: list[float] = []
    for lasts in (0.0, 0.0, 0.0, 10.0, 0.0):
        restarts.start()
        assert restarts.delay is None
        now += lasts
        restarts.end()
        assert restarts.delay is not None
        delays.append(round(restarts.delay, 3))
        now += restarts.delay + 0.001  # seconds

    assert delays == [0.1, 0.2, 0.4, 0.1, 0.2]
    assert restarts.delay == 0.0
